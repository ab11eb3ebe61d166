"""The command ``python -m tests.fuzz``."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable

from tests.fuzz import __doc__ as about
from tests.fuzz.arrivals import fuzz_arrivals, fuzz_headers, sender
from tests.fuzz.messages import (
    fuzz_counts,
    fuzz_failures,
    fuzz_histories,
    fuzz_messages_between_workers,
    fuzz_messages_to_the_scheduler,
    fuzz_questions,
    fuzz_shares,
)
from tests.fuzz.readers import (
    fuzz_annotations,
    fuzz_configuration,
    fuzz_device_names,
    fuzz_simulated_devices,
    fuzz_visible_devices,
)

TARGETS: list[Callable[[random.Random], str]] = [
    fuzz_visible_devices,
    fuzz_visible_devices,
    fuzz_device_names,
    fuzz_device_names,
    fuzz_annotations,
    fuzz_configuration,
    fuzz_simulated_devices,
    fuzz_messages_to_the_scheduler,
    fuzz_failures,
    fuzz_headers,
    fuzz_messages_between_workers,
    fuzz_shares,
    fuzz_histories,
    fuzz_questions,
    fuzz_counts,
    fuzz_arrivals,
]


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=None)
    arguments = parser.parse_args(given)
    seed = random.randrange(2**32) if arguments.seed is None else arguments.seed
    chance = random.Random(seed)
    outcomes: Counter[str] = Counter()
    started = time.monotonic()
    with sender():
        for number in range(arguments.inputs):
            target = TARGETS[number % len(TARGETS)]
            try:
                outcomes[f"{target.__name__}: {target(chance)}"] += 1
            except BaseException:
                print(f"input {number} of seed {seed} in {target.__name__}", file=sys.stderr)
                raise
    for outcome, count in sorted(outcomes.items()):
        print(f"{count:9d}  {outcome}")
    print(f"{arguments.inputs} inputs of seed {seed} in {time.monotonic() - started:.1f} s")
    return int(any("words" in outcome for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
