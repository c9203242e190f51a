"""Python imports this first when its directory is on PYTHONPATH: rank 1 of a job gets the fault that FAULT names."""

import os
import time


def sleeps() -> None:
    """50 ms a micro-batch."""
    from mindferry.training.reduction import GradientExchange

    computed = GradientExchange.computed

    def slower(self, loss, last):
        time.sleep(0.05)
        return computed(self, loss, last)

    GradientExchange.computed = slower


def twice_the_tokens() -> None:
    from mindferry.training import engine

    prepare = engine.prepare

    def more(run, options):
        content = prepare(run, options)
        content["runner_config"]["batch_size"] *= 8
        return content

    engine.prepare = more


def slow_shard() -> None:
    """Every batch of its share comes 200 ms late."""
    from mindspore.dataset.engine.iterators import Iterator

    following = Iterator.__next__

    def slower(self):
        time.sleep(0.2)
        return following(self)

    Iterator.__next__ = slower


FAULTS = {"sleep": sleeps, "tokens": twice_the_tokens, "data": slow_shard}

if os.environ.get("RANK_ID") == "1" and os.environ.get("FAULT") in FAULTS:
    FAULTS[os.environ["FAULT"]]()
