// Draws the quorum wheel, the score matrix and the costs of the numbers that are chosen.
"use strict";
{
  const OTHERS = ["#d0d0d0", "#c0c0c0", "#b0b0b0"];
  const form = document.getElementById("explorer");
  const byId = (id) => document.getElementById(id);

  const color = (owner, task, numTasks) => {
    if (owner === task) return EXPLORER.colors[0];
    if (numTasks > EXPLORER.colors.length) return OTHERS[owner % OTHERS.length];
    return EXPLORER.colors[(owner - task + numTasks) % numTasks];
  };

  const drawWheel = (numTasks, quorum) => {
    const place = (group) => {
      const angle = (2 * Math.PI * group) / numTasks;
      return [100 + 80 * Math.sin(angle), 100 - 80 * Math.cos(angle)];
    };
    const line = ([x1, y1], [x2, y2]) =>
      `<line x1="${x1}" y1="${y1}" x2="${x2}" y2="${y2}" stroke="${EXPLORER.colors[0]}"/>`;
    let parts = '<circle cx="100" cy="100" r="80" fill="none" stroke="gray"/>';
    quorum.forEach((first, i) =>
      quorum.slice(i + 1).forEach((second) => (parts += line(place(first), place(second)))));
    for (let group = 0; group < numTasks; group++) {
      const [x, y] = place(group);
      const isRead = quorum.includes(group);
      const fill = isRead ? EXPLORER.colors[0] : "gray";
      parts += `<circle cx="${x}" cy="${y}" r="${isRead ? 5 : 2.5}" fill="${fill}"/>`;
    }
    byId("explorer-wheel").innerHTML = parts;
  };

  const drawMatrix = (owners, task, numTasks) => {
    const tokens = EXPLORER.groups * numTasks;
    const canvas = byId("explorer-matrix");
    canvas.width = canvas.height = tokens * Math.max(Math.floor(480 / tokens), 1);
    const size = canvas.width / tokens;
    const pen = canvas.getContext("2d");
    pen.fillStyle = "white";
    pen.fillRect(0, 0, canvas.width, canvas.height);
    let own = 0, live = 0;
    [...owners].forEach((letter, cell) => {
      if (letter === ".") return;
      const owner = EXPLORER.letters.indexOf(letter);
      live += 1;
      own += owner === task;
      pen.fillStyle = color(owner, task, numTasks);
      pen.fillRect((cell % tokens) * size, Math.floor(cell / tokens) * size, size, size);
    });
    return own / live;
  };

  const fillCosts = (costs, tokens) => {
    const gibibytes = (bytes) => ((bytes * tokens) / 2 ** 30).toPrecision(3);
    byId("explorer-costs").innerHTML = Object.entries(costs ?? {})
      .map(([method, [received, peak]]) =>
        `<tr><td>${method}</td><td>${gibibytes(received)}</td><td>${gibibytes(peak)}</td></tr>`)
      .join("");
    byId("explorer-costs").closest("table").hidden = !costs;
  };

  const update = () => {
    const numTasks = Number(form.tasks.value);
    form.task.max = numTasks - 1;
    const task = Math.min(Number(form.task.value), numTasks - 1);
    const { interest, owners, costs } = EXPLORER.tasks[numTasks];
    const quorum = interest.map((group) => (group + task) % numTasks).sort((a, b) => a - b);
    drawWheel(numTasks, quorum);
    const share = drawMatrix(owners[form.kind.value], task, numTasks);
    fillCosts(costs[form.kind.value], Number(form.tokens.value));
    byId("explorer-number").textContent = numTasks;
    byId("explorer-task").textContent = task;
    byId("explorer-text").textContent =
      `Task ${task} of ${numTasks} reads groups ${quorum.join(", ")}: ` +
      `${((100 * quorum.length) / numTasks).toFixed(1)} % of the tokens. ` +
      `It computes ${(100 * share).toFixed(1)} % of the pairs.`;
  };

  form.addEventListener("input", update);
  update();
}
