"""The tables of `model_parallel.py`, for `figures.py`, which needs no TensorFlow."""

import itertools
from collections.abc import Sequence

import runs


def tasks(records: Sequence[dict]) -> str:
    """Processor time and memory of each worker task, by size."""
    return "\n\n".join(
        _of_size(list(group)) for _, group in itertools.groupby(_of(records, "on tasks"), _size)
    )


def pieces(records: Sequence[dict]) -> str:
    """How many times as fast pieces are as one device, by mini-batch."""
    parts = []
    for batch, group in itertools.groupby(_of(records, "pieces"), lambda r: r["options"]["batch"]):
        where = list(group)
        header = ["pieces", "ideal, 2m / (m + 1)"]
        for record in where:
            header += [record["where"], "share of the ideal"]
        rows = []
        for m in where[0]["options"]["pieces"]:
            ideal = 2 * m / (m + 1)
            row = [str(m), f"{ideal:.2f}"]
            for record in where:
                pairs = zip(record["ms"]["one device"], record["ms"][str(m)], strict=True)
                faster = [one / several for one, several in pairs]
                row += [runs.spread(faster, 2), runs.spread([f / ideal for f in faster], 2)]
            rows.append(row)
        of = where[0]["options"]
        title = (
            f"{of['layers']} layers of {of['width']:,}, mini-batches of {batch:,}, of "
            f"{of['repetitions']} repetitions in turn the median, and the least to the most:"
        )
        parts.append("\n\n".join([title, runs.table(header, rows), *_commands(where)]))
    return "\n\n".join(parts)


def one_part(records: Sequence[dict]) -> str:
    """What a replica in one part costs, beside one without parts."""
    (record,) = _of(records, "in turn")
    rows = [[name, runs.spread(ms, 0)] for name, ms in record["cpu_ms"].items()]
    table = runs.table(["", "CPU ms of a mini-batch"], rows)
    return "\n\n".join([table, *_commands([record])])


def _of_size(group: list[dict]) -> str:
    rows = []
    for record in group:
        workers = [name for name in record["cpu_ms"] if name.startswith("worker")]
        together = [sum(each) for each in zip(*(record["cpu_ms"][w] for w in workers), strict=True)]
        several = record["options"]["microbatches"]
        rows.append(
            [
                f"{len(workers)}, {record['parts']}" + (f", {several} pieces" * (several > 1)),
                ", ".join(runs.spread(record["cpu_ms"][w], 0) for w in workers),
                runs.spread(together, 0),
                ", ".join(f"{record['peak_mb'][w]:,.0f}" for w in workers),
            ]
        )
    of = group[0]["options"]
    title = (
        f"{of['layers']} layers of {of['width']:,} ({group[0]['weights_mb']:.0f} MB), mini-batches "
        f"of {of['batch']}, SGD, medians of {of['repetitions']} (smallest-largest):"
    )
    header = ["tasks of the worker, parts", "CPU ms of a mini-batch, each task", "together"]
    header.append("peak memory since the start, MB, each task")
    return "\n\n".join([title, runs.table(header, rows), *_commands(group)])


def _of(records: Sequence[dict], kind: str) -> list[dict]:
    found = [record for record in records if record["kind"] == kind]
    if not found:
        raise ValueError(f"No record is of the kind {kind!r}.")
    return found


def _size(record: dict) -> tuple[int, ...]:
    return tuple(record["options"][name] for name in ("width", "layers", "batch"))


def _commands(group: Sequence[dict]) -> list[str]:
    """Where they ran, once, and all commands."""
    first = runs.heading(group[0])
    also = ", ".join(f"`{record['command']}`" for record in group[1:])
    return [f"{first} Also {also}." if also else first]
