"""Slots of shared GPU memory, tested without a GPU."""

import threading
from pathlib import Path

import pytest

from tests.execute.fake_gpu import CPU, Card, exchange_by_card, installed
from tests.pool import Pool
from varuna.execute.comm import slots


@pytest.mark.parametrize("idle", [False, True])
def test_a_slot_is_returned_with_an_event_if_the_device_is_busy(tmp_path: Path, idle: bool) -> None:
    """An idle device needs no event: on a shared GPU a record would cost a turn."""
    card, computed = Card(tmp_path, seed=0), threading.Event()
    with installed(card, uuid="0"):
        receiver = slots.SlotReceiver(CPU)
        slot = slots.OwnSlot(3, 64, receiver.device)
        card.computing.synchronize()
        if not idle:
            card.computing.put(computed.wait)
        before = slot.emptied.recorded
        message = slots.SlotMemory(slot, 64, receiver._freed)
        assert receiver.take_freed() == []
        del message
        assert receiver.take_freed() == [3] and receiver.take_freed() == []
        assert slot.emptied.recorded - before == (0 if idle else 1)
        computed.set()


@pytest.mark.parametrize("same_card", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_messages_in_slots_arrive_complete_and_none_is_missed(
    pool: Pool, tmp_path: Path, seed: int, same_card: bool
) -> None:
    """V21: whichever host or device is ahead; on one GPU and on two."""
    for by_slot, wrong in pool.run(exchange_by_card, 2, str(tmp_path), seed, 200, same_card):
        assert wrong == [] and by_slot > 50
