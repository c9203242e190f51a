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
    """Its share of the data comes from a slow disk."""
    from mindspore.dataset import Dataset

    batch = Dataset.batch

    def waits(row):
        time.sleep(0.6)
        return row

    def slower(self, *args, **kwargs):
        return batch(self, *args, **kwargs).map(operations=[waits], input_columns=["input_ids"])

    Dataset.batch = slower


FAULTS = {"sleep": sleeps, "tokens": twice_the_tokens, "data": slow_shard}

if os.environ.get("RANK_ID") == "1" and os.environ.get("FAULT") in FAULTS:
    FAULTS[os.environ["FAULT"]]()
