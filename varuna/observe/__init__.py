"""Records, measures, merges and draws timelines, and writes them as traces."""

from varuna.observe.draw import to_svg, to_text
from varuna.observe.pace import Pace
from varuna.observe.record import Recorder, bubble, merge
from varuna.observe.trace import to_perfetto

__all__ = ["Pace", "Recorder", "bubble", "merge", "to_perfetto", "to_svg", "to_text"]
