"""Assign query-key pairs to tasks, in integer arithmetic without torch or Ray."""

from cqs.scheduler.cost import AttentionShape, TaskCost, predict_cost
from cqs.scheduler.interest_sets import check_interest_set, load_interest_set, load_interest_sets
from cqs.scheduler.kinds import Documents, Grid2D, Hosts, Kind, Quorums
from cqs.scheduler.plan import Plan, make_plan
from cqs.scheduler.quorum import owned_pairs, quorum, shared_pair
from cqs.scheduler.task import Block, Step, Task
