"""The gain and cost of padding: sequences of 1 to 128 tokens through a masked model, served over HTTP.

`python -m penstock.perf.padding` compares, at equal useful elements, evenly spread lengths with one fixed length, with
and without padding, and with other than the default buckets. All run in turns, round after round, and the table holds
medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from . import bench, models
from .calls import Call
from .claims import verdict
from .server_process import Process, penstock

LONGEST = 128
FIXED = 64
CONNECTIONS = 64
VOCABULARY = 1000
BOUND = 0.8


def masked(width: int = 96, hidden: int = 384, vocabulary: int = VOCABULARY) -> onnx.ModelProto:
    """Build one layer of masked attention: `ids` and `mask` [N,L] in, `tokens` [N,L,width] and `pooled` [N,width] out.

    111,000 weights a token: a batch of 8 to 25 sequences of 64 tokens takes a core 1 to 3 ms.
    """
    rng = np.random.default_rng(6)
    weights = {
        name: rng.normal(0, shape[0] ** -0.5, shape).astype(np.float32)
        for name, shape in {
            "table": (vocabulary, width), "wq": (width, width), "wk": (width, width), "wv": (width, width),
            "wo": (width, width), "w1": (width, hidden), "w2": (hidden, width),
        }.items()
    }  # fmt: skip
    weights |= {"scale": np.array(width**-0.5, np.float32), "one": np.array(1, np.float32)}
    weights["far"] = np.array(1e9, np.float32)
    axes = {"first": np.array([1], np.int64), "second": np.array([2], np.int64)}
    steps = (
        ("Gather", "table ids", "x"), ("MatMul", "x wq", "q"), ("MatMul", "x wk", "k"), ("MatMul", "x wv", "v"),
        ("Transpose", "k", "kt"), ("MatMul", "q kt", "raw"), ("Mul", "raw scale", "scores"), ("Cast", "mask", "real"),
        ("Sub", "real one", "lack"), ("Mul", "lack far", "bias"), ("Unsqueeze", "bias first", "wide"),
        ("Add", "scores wide", "seen"), ("Softmax", "seen", "share"), ("MatMul", "share v", "mixed"),
        ("MatMul", "mixed wo", "out"), ("Add", "x out", "h"), ("MatMul", "h w1", "up"), ("Relu", "up", "bent"),
        ("MatMul", "bent w2", "down"), ("Add", "h down", "tokens"), ("Unsqueeze", "real second", "weight"),
        ("Mul", "tokens weight", "kept"), ("ReduceSum", "kept first", "sum"), ("ReduceSum", "weight first", "count"),
        ("Div", "sum count", "pooled"),
    )  # fmt: skip
    attributes: dict[str, dict[str, Any]] = {
        "Transpose": {"perm": [0, 2, 1]}, "Cast": {"to": TensorProto.FLOAT}, "Softmax": {"axis": -1},
        "ReduceSum": {"keepdims": 0},
    }  # fmt: skip
    nodes = [
        helper.make_node(kind, input_names.split(), [output_name], **attributes.get(kind, {}))
        for kind, input_names, output_name in steps
    ]
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ["N", "L"]) for name in ("ids", "mask")]
    outputs = [
        helper.make_tensor_value_info("tokens", TensorProto.FLOAT, ["N", "L", width]),
        helper.make_tensor_value_info("pooled", TensorProto.FLOAT, ["N", width]),
    ]
    tensors = [numpy_helper.from_array(array, name) for name, array in (weights | axes).items()]
    graph = helper.make_graph(nodes, "masked", inputs, outputs, tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return model


@dataclass(slots=True, kw_only=True)
class Line(bench.CaseRounds):
    """One line of the table. `buckets`: () for the default, None for no padding, where the client sends the mask."""

    name: str
    lengths: tuple[int, ...]
    buckets: tuple[int, ...] | None

    @property
    def model(self) -> str:
        return self.name.replace(" ", "_")

    @property
    def tokens(self) -> float:
        """Mean number of useful tokens in a request."""
        return statistics.mean(self.lengths)

    def share_of(self, reference: Line) -> float:
        """Return the median ratio of its tokens to another line's in the same round, since machines drift."""
        return self.ratio_to(reference, "requests_per_s") * self.tokens / reference.tokens


def lines() -> list[Line]:
    """Return the table's lines. The second is the one with a target."""
    spread = tuple(np.random.default_rng(8).permutation(np.arange(1, LONGEST + 1)).tolist())
    powers, eights = (16, 32, 64, 128), (*range(8, 65, 8), *range(80, LONGEST + 1, 16))
    return [
        Line(name="one length", lengths=(FIXED,), buckets=None),
        Line(name="padded", lengths=spread, buckets=()),
        Line(name="padded to powers of two", lengths=spread, buckets=powers),
        Line(name="padded by eights at first", lengths=spread, buckets=eights),
        Line(name="not padded", lengths=spread, buckets=None),
    ]


def make(folder: Path, table: Iterable[Line]) -> None:
    """Write the models, one per line."""
    for line in table:
        models.make(folder, {line.model: masked})
        if line.buckets is not None:
            buckets_line = f"buckets = {list(line.buckets)}\n" if line.buckets else ""
            text = f'[padding.ids]\naxis = 0\nmask = "mask"\n{buckets_line}'
            (folder / line.model / "penstock.toml").write_text(text, "utf-8")


def call(line: Line, *, tokens: bool) -> Call:
    """Make the requests, as JSON headers and raw tensors. All headers have one length, since wrk sends only one."""
    rng = np.random.default_rng(9)
    heads, tails = [], []
    for length in line.lengths:
        tensors = {"ids": rng.integers(0, VOCABULARY, (1, length))}
        if line.buckets is None:
            tensors["mask"] = np.ones((1, length), np.int64)
        input_entries = [
            {
                "name": name, "shape": array.shape, "datatype": "INT64",
                "parameters": {"binary_data_size": array.nbytes},
            }
            for name, array in tensors.items()
        ]  # fmt: skip
        names = ("pooled", "tokens") if tokens else ("pooled",)
        output_entries = [{"name": name, "parameters": {"binary_data": True}} for name in names]
        heads.append(json.dumps({"inputs": input_entries, "outputs": output_entries}).encode())
        tails.append(b"".join(array.tobytes() for array in tensors.values()))
    size = max(map(len, heads))
    bodies = tuple(head.ljust(size) + tail for head, tail in zip(heads, tails, strict=True))
    headers = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(size)}
    return Call(f"/v2/models/{line.model}/infer", bodies, headers)


def measure(server: Process, line: Line, seconds: int, *, tokens: bool) -> None:
    """Put one round of load on a line's model."""
    line.drive(server, line.model, call(line, tokens=tokens), CONNECTIONS, seconds)


def table(lines: list[Line]) -> str:
    """Format the medians, and whether the target is met."""
    titles = f"{'p50 ms':>7} {'p99 ms':>7} {'CPU us':>7} {'rows/batch':>10}"
    rows = [f"{'':<26} {'req/s':>8} {'tokens/s':>10} {'of one':>7} {titles}"]
    for line in lines:
        rate, p50, p99, cpu = map(line.median, ("requests_per_s", "p50_ms", "p99_ms", "cpu_us"))
        row = f"{line.name:<26} {rate:>8,.0f} {rate * line.tokens:>10,.0f} {line.share_of(lines[0]):>7.2f}"
        row += f" {p50:>7.2f} {p99:>7.2f} {cpu:>7.1f} {line.rows:>10.1f}"
        failed = sum(load.refused + load.broken for load in line.loads)
        rows.append(row + (f"  {failed} FAILED" if failed else ""))
    throughput_ratio = lines[1].share_of(lines[0])
    claim = f"padded: {throughput_ratio:.2f} of one length's throughput at equal useful elements, at least {BOUND}"
    return "\n".join([*rows, verdict(claim, throughput_ratio >= BOUND)])


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=4, help="of load per line and round")
    parser.add_argument("--tokens", action="store_true", help="ask for the output per token too, which is trimmed")
    args = parser.parse_args()
    table_lines = lines()
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), table_lines)
        with penstock(Path(folder)) as server:
            for line in table_lines:  # nothing is measured that fails, and every length has run once
                sent = call(line, tokens=args.tokens)
                server.request("POST", sent.path, sent.bodies[0], sent.headers)
                measure(server, line, 2, tokens=args.tokens)
                line.loads.clear()
                line.rows_per_batch.clear()
            for number in range(args.rounds):
                for line in table_lines:
                    measure(server, line, args.seconds, tokens=args.tokens)
                print(f"round {number + 1} of {args.rounds} done", flush=True)
    print(table(table_lines))


if __name__ == "__main__":
    main()
