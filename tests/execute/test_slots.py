"""Slots of device memory: what can be said of them without a device."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.execute.card import exchange_by_card
from tests.pool import Pool
from varuna.execute import slots


class Stream:
    idle = False

    def query(self) -> bool:
        return self.idle


class Event:
    def __init__(self, **_: object) -> None:
        self.records = 0

    def record(self, _: Stream) -> None:
        self.records += 1


class Card:
    """As much of `torch.cuda` as a lender needs."""

    Event = Event

    def __init__(self) -> None:
        self.stream = Stream()

    def current_stream(self, _: torch.device) -> Stream:
        return self.stream


@pytest.mark.parametrize("idle", [False, True])
def test_a_slot_goes_back_with_word_of_what_the_device_has_still_to_do(
    monkeypatch: pytest.MonkeyPatch, idle: bool
) -> None:
    """An idle device has nothing to do any more: on a card that is shared, a record would cost a turn."""
    card: Any = Card()
    monkeypatch.setattr(slots, "cuda", card)
    lender = slots.Lender(torch.device("cpu"))
    slot = slots.Lent(3, 64, lender.device)
    assert slot.emptied.records == 1 and lender.take_back() == []
    card.stream.idle = idle
    message = slots.Message(slot, 64, lender._returned)
    assert lender.take_back() == []
    del message
    assert lender.take_back() == [3] and lender.take_back() == []
    assert slot.emptied.records == (1 if idle else 2)


@pytest.mark.parametrize("same_card", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_messages_in_slots_arrive_whole_and_none_is_slept_through(
    pool: Pool, tmp_path: Path, seed: int, same_card: bool
) -> None:
    """V21: whichever of hosts and devices is ahead; on one card, and on two."""
    for by_slot, wrong in pool.run(exchange_by_card, 2, str(tmp_path), seed, 200, same_card):
        assert wrong == [] and by_slot > 50
