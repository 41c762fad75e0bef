"""The generator is reproducible, and its rows are what the reader reads."""

import gzip
import hashlib
import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcm.core.errors import InvalidArgument
from kvcm.optimizer.trace import ceiling, read_trace
from kvcm.optimizer.workload import WorkloadKind, encode_rows, generate, write_rows


@pytest.mark.parametrize("kind", list(WorkloadKind))
def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(kind):
    first = encode_rows(generate(kind, 200, 7))
    assert encode_rows(generate(kind, 200, 7)) == first
    assert encode_rows(generate(kind, 200, 8)) != first


def test_the_bytes_of_a_seed_do_not_change_between_releases():
    digest = hashlib.sha256(encode_rows(generate(WorkloadKind.MIXED, 300, 1))).hexdigest()
    assert digest == "fd74bdf160d3cc594d8e623851e52c6df75beda1e0578bee0b0e3b4a1038f750"


def test_a_shorter_trace_is_the_beginning_of_a_longer_one():
    long = encode_rows(generate(WorkloadKind.MIXED, 120, 3))
    assert long.startswith(encode_rows(generate(WorkloadKind.MIXED, 50, 3)))


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(list(WorkloadKind)),
    st.integers(0, 60),
    st.integers(-(2**70), 2**70),
    st.sampled_from([16, 512, 1000]),
)
def test_generated_rows_pass_the_strict_reader(tmp_path_factory, kind, count, seed, block_size):
    rows = generate(kind, count, seed, block_size=block_size)
    path = tmp_path_factory.mktemp("w") / "t.jsonl"
    with path.open("wb") as file:
        write_rows(file, rows, block_size=block_size)
    assert read_trace(path, block_size=block_size).rows == rows
    assert len(rows) == count


def test_equal_ids_mean_equal_prefixes():
    before: dict[int, tuple[int, ...]] = {}
    for row in generate(WorkloadKind.MIXED, 400, 5):
        for i, block in enumerate(row.hash_ids):
            assert before.setdefault(block, row.hash_ids[:i]) == row.hash_ids[:i]


@pytest.mark.parametrize("kind", list(WorkloadKind))
def test_conversations_come_back_and_share_system_prompts(kind):
    rows = generate(kind, 500, 2)
    best = ceiling(r.hash_ids for r in rows)
    assert 0.5 < best.block_rate < 0.97
    starts = [r.hash_ids[0] for r in rows]
    assert 1 < len(set(starts)) < 20


def test_agents_branch_off_what_was_said():
    rows = generate(WorkloadKind.AGENT, 600, 4)
    children: dict[int, set[int]] = {}
    for row in rows:
        for left, right in zip(row.hash_ids, row.hash_ids[1:], strict=False):
            children.setdefault(left, set()).add(right)
    roots = {r.hash_ids[0] for r in rows}
    forks = [b for b, after in children.items() if len(after) > 2 and b not in roots]
    assert forks


def test_compressed_output_carries_no_time():
    rows = generate(WorkloadKind.CHAT, 5, 1)
    outputs = []
    for _ in range(2):
        buffer = io.BytesIO()
        write_rows(buffer, rows, block_size=512, compress=True)
        outputs.append(buffer.getvalue())
    assert outputs[0] == outputs[1]
    assert outputs[0][4:8] == bytes(4)
    assert gzip.decompress(outputs[0]) == encode_rows(rows)


def test_bad_arguments_are_named():
    with pytest.raises(InvalidArgument, match="requests"):
        generate(WorkloadKind.CHAT, -1, 1)
    with pytest.raises(InvalidArgument, match="block_size"):
        generate(WorkloadKind.CHAT, 1, 1, block_size=0)
