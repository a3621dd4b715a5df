"""Page tables on the device: what is there is what the plan says, and only what is new is sent."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt

from sgl.runtime.device_pages import DevicePages
from sgl.runtime.page_table import PageTable
from sgl.runtime.plan import Chunk


class Device:
    """The array, as the device would have it."""

    def __init__(self, size: int) -> None:
        self.pages = DevicePages(size)
        self.array: npt.NDArray[np.int32] = np.full(size, -1, dtype=np.int32)
        self.sent = 0

    def step(self, tables: dict[int, PageTable]) -> bool:
        """Send what is new, and compare; False where there is no room."""
        chunks = [
            Chunk(sequence=id, token_ids=[0], start=len(table) - 1, page_table=table.view)
            for id, table in tables.items()
        ]
        placed = self.pages.place(chunks, [len(table) for table in tables.values()])
        if placed is None:
            return False
        self.array[placed.targets] = placed.values
        self.sent = len(placed.targets)
        for first, table in zip(placed.first, tables.values(), strict=True):
            assert self.array[first : first + len(table)].tolist() == table.view.tolist()
        return True


def test_a_decoding_step_sends_one_entry_per_row() -> None:
    tables = {row: PageTable(np.arange(row, row + 1024)) for row in range(256)}
    device = Device(256 * 8192)
    device.step(tables)
    assert device.sent == 256 * 1024
    sent = []
    for step in range(40):
        for table in tables.values():
            table.extend([step])
        device.step(dict(random.Random(step).sample(sorted(tables.items()), 256)))
        sent.append(device.sent)
    assert set(sent) == {256}, "also when the first page makes each table's array grow"
    for table in tables.values():
        table.cut(1060)
        table.extend(range(2, 6))
    device.step(tables)
    assert device.sent == 256 * 4, "what wrong guesses had is written over"


def test_tables_that_change_come_and_go_are_what_the_plan_says() -> None:
    """Whatever happens to tables: pages are added, cut off and replaced, rows rest, end, and come in another order."""
    rng = random.Random(0)
    tables: dict[int, PageTable] = {}
    device = Device(3000)
    next_id = resets = 0
    for _ in range(1500):
        for table in tables.values():
            act = rng.random()
            if act < 0.7:
                table.extend([rng.randrange(10**6) for _ in range(1 if act < 0.6 else rng.randrange(1, 30))])
            elif act < 0.8:
                table.cut(rng.randrange(1, len(table) + 1))
            elif act < 0.9:
                first = rng.randrange(len(table))
                table.replace(
                    first, np.array([rng.randrange(10**6) for _ in range(len(table) - first)], dtype=np.int32)
                )
        if len(tables) < 8 or rng.random() < 0.1:
            next_id += 1
            tables[next_id] = PageTable([rng.randrange(10**6) for _ in range(rng.randrange(1, 60))])
        for id in [id for id, table in tables.items() if len(table) > 200 or rng.random() < 0.02]:
            del tables[id]
        planned = dict(rng.sample(sorted(tables.items()), rng.randrange(len(tables) + 1)))
        before = len(device.pages._parts)
        assert device.step(planned)
        resets += len(device.pages._parts) < before
    assert resets > 3


def test_tables_without_room_are_left_out_and_a_failed_step_counts_for_nothing() -> None:
    device = Device(300)
    tables = {row: PageTable(range(100)) for row in range(2)}
    assert not device.step(tables)
    assert device.step({0: tables[0]})
    assert device.step({0: tables[0]})
    assert device.sent == 0
    device.pages.forget()
    device.step({0: tables[0]})
    assert device.sent == 100
