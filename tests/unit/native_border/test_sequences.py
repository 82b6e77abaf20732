"""Sequences that make their items on demand, change during a call, or report a wrong length do not crash the core."""

from __future__ import annotations

import pytest

from tests.unit.native_border.crash import run

SEQUENCES = """
from flexkv.transfer.graph import Edge, OpKind, Priority, TransferOp

none32 = np.empty(0, np.int32)

def op(number):
    return TransferOp(number, OpKind.H2D, 0, Priority.LOAD, none32, none32)

class OnDemand:
    def __init__(self, make, count):
        self.make, self.count = make, count
    def __len__(self):
        return self.count
    def __getitem__(self, at):
        if at >= self.count:
            raise IndexError(at)
        return self.make(at)

class Lying(OnDemand):
    def __len__(self):
        return 1 << 40

class Resizing(OnDemand):
    calls = 0
    def __len__(self):
        self.calls += 1
        return 4 if self.calls < 2 else self.count

class Clearing:
    def __index__(self):
        victims.clear()
        return 1

engine = c_ext.TransferEngine(None, 8, 1, 30.0, [])
"""


def test_ops_made_on_demand_are_read_whole() -> None:
    said = run(
        SEQUENCES
        + "caught(engine.submit, OnDemand(op, 2000), OnDemand(lambda at: Edge(at, at + 1, 0), 1000))"
    )
    assert said == "ContractError op 0 (number 0 of its graph): group 0 has no view attached\n"


def test_an_array_is_no_list_of_ops() -> None:
    said = run(SEQUENCES + "caught(engine.submit, np.zeros((200, 11), np.int64), [])")
    assert said.startswith("ContractError ")


def test_an_op_without_a_field_is_refused_by_the_fields_name() -> None:
    said = run(SEQUENCES + "caught(engine.submit, [OnDemand(lambda at: at, 1 << 40)], [])")
    assert said == "ContractError an op of a graph has no field 'op_id': given a OnDemand\n"


@pytest.mark.parametrize("length", ["1 << 40", "-1"])
def test_a_length_that_cannot_be_is_refused_before_anything_is_reserved(length: str) -> None:
    said = run(
        SEQUENCES
        + f"""
        class Wrong(OnDemand):
            def __len__(self):
                return {length}
        wrong = Wrong(op, 3)
        caught(engine.submit, wrong, [])
        caught(c_ext.BlockIndex, Wrong(lambda at: 5, 3))
        caught(c_ext.TransferEngine, None, 8, 1, 30.0, wrong)
        """.replace("\n        ", "\n")
    )
    lines = said.splitlines()
    wanted = (
        "ContractError a sequence of 1099511627776 items; allowed are up to 1048576"
        if length != "-1"
        else ("ValueError __len__() should return >= 0")
    )
    assert lines == [wanted] * 3


def test_a_list_that_becomes_shorter_while_it_is_read_is_refused() -> None:
    said = run(
        SEQUENCES
        + """
        victims = [Clearing(), 2, 3]
        caught(c_ext.BlockIndex, victims)
        victims = {0: [Clearing()], 1: ["b"]}
        caught(c_ext.GDSManager, victims, 2)
        victims = {Clearing(): ["a"], 1: ["b"]}
        caught(c_ext.GDSManager, victims, 2)
        """.replace("\n        ", "\n")
    )
    first, second, third = said.splitlines()
    assert first == "ContractError a sequence of 3 items became shorter than 2 while it was read"
    assert second.startswith("TypeError ssd_files must map")
    assert third.startswith("ConfigError ")


@pytest.mark.parametrize(("later", "said"), [(2, "IndexError"), (1 << 20, "nothing was raised")])
def test_axes_are_four_whatever_length_is_claimed_later(later: int, said: str) -> None:
    code = f"""
    axes = [Resizing(lambda at: 1, {later}) for _ in range(5)]
    caught(c_ext.PageConversion, axes[0], 1, (axes[1], axes[2], 1), (axes[3], axes[4], 1))
    """
    assert run(SEQUENCES + code.replace("\n    ", "\n")).startswith(said)


def test_a_chain_that_an_odd_token_extends_is_refused() -> None:
    said = run(
        """
        class Extending:
            def __index__(self):
                chain.extend([1, 2, 3, 4])
                return 1
        chain = c_ext.TokenChain(4)
        caught(chain.extend, [Extending(), 2, 3, 4])
        print(len(chain))
        """
    )
    assert said == "ContractError extend: the chain was changed while tokens were read\n1\n"
