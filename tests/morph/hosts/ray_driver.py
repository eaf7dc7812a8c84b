"""Starts agents on a Ray cluster, one per input line; runs in the environment with Ray."""

import json
import sys
import threading

import msgspec

from varuna.morph.protocol.orders import AgentOrders
from varuna.morph.starters.ray import RayAgent, RayStarter


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # Ray says this and that on stdout
    address, python, agent = sys.argv[1:]
    starter = RayStarter(address=address, python=python, agent=(agent,))
    agents: dict[str, RayAgent] = {}
    for line in sys.stdin:
        what, machine, rest = line.split(" ", 2)
        answer: str | None = None
        if what == "start":
            try:
                agents[machine] = starter.start(msgspec.json.decode(rest, type=AgentOrders))
            except (OSError, ValueError) as error:
                answer = str(error)
        elif what == "kill":
            agents[machine].kill()
        elif what == "ended":
            answer = agents[machine].ended()
        elif what == "wait":
            while (answer := agents[machine].ended()) is None:
                threading.Event().wait(0.02)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
