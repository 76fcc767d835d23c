"""Every case and every contender, by name."""

from benchmarks.by_hand import BY_HAND
from benchmarks.cases import CASES, Case
from benchmarks.contender import Contender
from benchmarks.ours import OURS
from benchmarks.peers import PEERS

CONTENDERS = [*OURS, BY_HAND, *PEERS]
BASELINE = "adam"


def find_case(name: str) -> Case:
    return {case.name: case for case in CASES}[name]


def find_contender(name: str) -> Contender:
    return {contender.name: contender for contender in CONTENDERS}[name]
