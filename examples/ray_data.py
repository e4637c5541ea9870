"""Embed documents with Ray Data; the workers of a ``cqs.Cluster`` share the long ones.

Run ``python examples/ray_data.py``, or with longer documents ``--max-length 262144``. An actor of
the Ray Data pipeline opens the cluster, submits a batch of documents and returns their embeddings.
The script compares one embedding with attention in this process.
"""

import argparse
from concurrent.futures import as_completed
from typing import Any

import numpy as np
import ray.data
import torch
from torch import Tensor, nn

import cqs

VOCABULARY = 1000


class Encoder(nn.Module):
    """One attention layer whose output is averaged over the tokens of a document."""

    def __init__(self, width: int = 64, num_heads: int = 4) -> None:
        """Initialise the same parameters in every process."""
        super().__init__()
        torch.manual_seed(0)
        self.width, self.num_heads = width, num_heads
        self.embedding, self.heads = nn.Embedding(VOCABULARY, width), nn.Linear(width, 3 * width)

    def project(self, tokens: Tensor) -> Tensor:
        """Return query, key and value, ``[3, 1, num_heads, seqlen, head_dim]``."""
        heads = self.heads(self.embedding(tokens)).unflatten(-1, (3, 1, self.num_heads, -1))
        projected: Tensor = heads.permute(1, 2, 3, 0, 4)
        return projected

    def pool(self, output: Tensor | cqs.AttentionOutput) -> Tensor:
        """Return the embedding of a document, ``[width]``, from the output of its attention."""
        assert isinstance(output, Tensor)
        return output.mean(dim=2).flatten()


class Embedder:
    """The actor of Ray Data, which keeps the cluster open while the pipeline runs."""

    def __init__(self, num_workers: int) -> None:
        """Open the cluster on the Ray cluster that runs this actor."""
        self.encoder = Encoder()
        self.cluster = cqs.Cluster(num_workers=num_workers)

    @torch.no_grad()
    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Add a column with the embeddings to a batch of documents."""
        embeddings = np.empty((len(batch["tokens"]), self.encoder.width), np.float32)
        rows: dict[Any, int] = {}
        for row, tokens in enumerate(batch["tokens"]):
            query, key, value = self.encoder.project(torch.tensor(tokens))
            rows[self.cluster.submit(query, key, value)] = row
        for future in as_completed(rows):
            embeddings[rows[future]] = self.encoder.pool(future.result())
        return {**batch, "embedding": embeddings}


def make_document(row: dict[str, int]) -> dict[str, Any]:
    """Read a document; here the tokens are random, with the number of the document as seed."""
    tokens = np.random.default_rng(row["document"]).integers(VOCABULARY, size=row["length"])
    return {"document": row["document"], "tokens": tokens}


def main(arguments: list[str] | None = None) -> None:
    """Embed the documents and compare the embedding of the shortest one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-documents", type=int, default=6)
    parser.add_argument("--max-length", type=int, default=2048, help="tokens, at least 256")
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--address", help="address of a Ray cluster; default: this machine")
    options = parser.parse_args(arguments)
    if not ray.is_initialized():
        # Workers of cqs keep their cores; the tasks of Ray Data require others.
        num_cpus = None if options.address else options.num_workers + 2
        ray.init(address=options.address, num_cpus=num_cpus)
    lengths = np.geomspace(256, options.max_length, options.num_documents).astype(int)
    rows = [{"document": i, "length": int(length)} for i, length in enumerate(lengths)]
    documents = ray.data.from_items(rows).map(make_document)
    embedded = documents.map_batches(
        Embedder,
        fn_constructor_args=(options.num_workers,),
        batch_size=4,
        compute=ray.data.ActorPoolStrategy(size=1),
        num_cpus=0,  # the workers of the cluster have cores or GPUs of their own
    )
    found = sorted(embedded.take_all(), key=lambda row: row["document"])
    for row in found:
        print(f"document {row['document']}: {len(row['tokens'])} tokens, {row['embedding'][:3]}")

    encoder, shortest = Encoder(), found[0]
    with torch.no_grad():
        query, key, value = encoder.project(torch.tensor(shortest["tokens"]))
        expected = encoder.pool(cqs.attention(query, key, value))
    deviation = (torch.tensor(shortest["embedding"]) - expected).abs().max().item()
    print(f"largest deviation from attention in one process: {deviation:.1e}")
    if deviation > 1e-5:
        raise SystemExit("the embeddings differ")


if __name__ == "__main__":
    main()
