"""What a ValkeyStore runs on the server, and how its arguments are laid out.

A shard is a few hashes under one hash tag, so that one script reaches all of it:

``kvcm{SPACE:NUMBER}`` followed by a table's digit, or by ``m`` for the shard's own record: ``f``
its fence, ``n`` its commit number, ``c…`` a counter each, ``s…`` how many records a table holds.

A script gets the keys of those tables only that it uses: while a slot moves, a server refuses
commands that name several keys of which some are not there.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from itertools import groupby

from kvcm.core.errors import CorruptRecord, InvalidArgument
from kvcm.metaindex.store import Claim, Fence, Mutation, ShardId, Table
from kvcm.metaindex.stores.common import check_shard

Args = list[bytes]

SIZED = frozenset((Table.EXTENTS, Table.STATES, Table.TRASH))
"""Tables that counters speak of: one that the server dropped by itself must be noticed."""

_PLAIN = re.compile(rb"[A-Za-z0-9_.-]+\Z")
_FENCE_DIGITS = 20
_UINT64 = 1 << 64

_COMMIT = b"""
local meta = KEYS[1]
local held = redis.call('HMGET', meta, 'f', 'n')
if held[1] ~= ARGV[1] then return {0, held[1] or ''} end
local sized = {}
for i = 1, #ARGV[2] do
  local field = string.sub(ARGV[2], i, i)
  if field ~= '-' then
    field = 's' .. field
    local size = redis.call('HLEN', KEYS[i + 1])
    if size ~= tonumber(redis.call('HGET', meta, field) or 0) then return {-1, field} end
    sized[#sized + 1] = {KEYS[i + 1], field, size}
  end
end
local at, count, out, applied = 3, #ARGV, {}, false
while at <= count do
  local compares, runs, counters = ARGV[at] + 0, ARGV[at + 1] + 0, ARGV[at + 2] + 0
  local holds = true
  at = at + 3
  for i = 1, compares do
    if holds then
      local how, want = ARGV[at + 1], ARGV[at + 3]
      local value = redis.call('HGET', KEYS[ARGV[at] + 0], ARGV[at + 2])
      if how == 'absent' then holds = not value
      elseif not value then holds = false
      elseif how == 'whole' then holds = value == want
      else holds = string.sub(value, 1, #want) == want end
    end
    at = at + 4
  end
  for i = 1, runs do
    local key, verb, size = KEYS[ARGV[at] + 0], ARGV[at + 1], ARGV[at + 2] + 0
    at = at + 3
    if holds then
      for first = at, at + size - 1, 2000 do
        redis.call(verb, key, unpack(ARGV, first, math.min(first + 1999, at + size - 1)))
      end
    end
    at = at + size
  end
  for i = 1, counters do
    if holds then
      local name = 'c' .. ARGV[at]
      local sum = redis.call('HINCRBY', meta, name, ARGV[at + 1])
      if sum == 0 then redis.call('HDEL', meta, name) end
    end
    at = at + 2
  end
  applied = applied or holds
  out[#out + 1] = holds and 'A' or 'C'
end
if not applied then return {1, tonumber(held[2]), table.concat(out)} end
for _, table in ipairs(sized) do
  local size = redis.call('HLEN', table[1])
  if size ~= table[3] then redis.call('HSET', meta, table[2], size) end
end
return {1, redis.call('HINCRBY', meta, 'n', 1), table.concat(out)}
"""

_CLAIM = b"""
local held = redis.call('HGET', KEYS[1], 'f')
if held then
  if #held ~= #ARGV[1] then return {-1, 'f'} end
  if held >= ARGV[1] then return {0, held} end
  redis.call('HSET', KEYS[1], 'f', ARGV[1])
else
  if redis.call('EXISTS', KEYS[1]) == 1 then return {-1, 'f'} end
  redis.call('HSET', KEYS[1], 'f', ARGV[1], 'n', 0)
end
return {1, redis.call('HGETALL', KEYS[1])}
"""

_TOUCH = b"""
local number = redis.call('HGET', KEYS[1], 'n')
if not number then return 0 end
redis.call('HINCRBY', KEYS[1], 'w', 1)
return tonumber(number)
"""

COMMIT = b"#!lua" + _COMMIT
FREE = b"#!lua flags=allow-oom" + _COMMIT
"""The same commit, which runs even when the server's memory is full."""
CLAIM = b"#!lua flags=allow-oom" + _CLAIM
TOUCH = b"#!lua flags=allow-oom" + _TOUCH
"""Gives the commit number, and writes, so that a WAIT behind it covers all earlier commits."""

SOURCES = {
    hashlib.sha1(source, usedforsecurity=False).hexdigest().encode(): source
    for source in (COMMIT, FREE, CLAIM, TOUCH)
}
"""Each script by the name under which a server knows it."""
NAMES = {source: name for name, source in SOURCES.items()}


def shard_tag(shard: ShardId) -> bytes:
    """What stands between the braces of the shard's keys; InvalidArgument if out of bounds."""
    check_shard(shard)
    space = shard.space
    # A brace would end the tag; hex has a % before it, which no plain space has.
    text = space if _PLAIN.match(space) else b"%%%b" % space.hex().encode()
    return b"%b:%d" % (text, shard.number)


def space_of(tag: bytes) -> bytes:
    """The space of a tag."""
    text = tag.rpartition(b":")[0]
    return bytes.fromhex(text[1:].decode()) if text.startswith(b"%") else text


def meta_key(tag: bytes) -> bytes:
    """The key of the shard's own record."""
    return b"kvcm{%b}m" % tag


def table_key(tag: bytes, table: int) -> bytes:
    """The key of one of its tables."""
    return b"kvcm{%b}%d" % (tag, table)


def encode_fence(fence: Fence) -> bytes:
    """A fence as text that sorts like the fence; InvalidArgument outside of 64 bits."""
    if not all(0 <= part < _UINT64 for part in fence):
        raise InvalidArgument(f"fence {tuple(fence)} is not two numbers of 64 bits")
    return b"%020d.%020d" % fence


def decode_fence(text: bytes) -> Fence:
    """The inverse of `encode_fence`; CorruptRecord when it does not parse."""
    epoch, _, n = text.partition(b".")
    if not (epoch.isdigit() and n.isdigit() and len(epoch) == len(n) == _FENCE_DIGITS):
        raise CorruptRecord(f"{text[:64]!r} is not a fence")
    return Fence(int(epoch), int(n))


def decode_claim(fields: Sequence[bytes]) -> tuple[Claim, dict[int, int]]:
    """The claim and the number of records of each sized table, from the meta record.

    Raises:
        CorruptRecord: it does not parse.
    """
    number: int | None = None
    counters: dict[bytes, int] = {}
    sizes: dict[int, int] = {}
    try:
        for name, value in zip(fields[::2], fields[1::2], strict=True):
            if name == b"n":
                number = int(value)
            elif name[:1] == b"c":
                counters[name[1:]] = int(value)
            elif name[:1] == b"s":
                sizes[int(name[1:])] = int(value)
    except ValueError as error:
        raise CorruptRecord(f"a shard's record: {error}") from error
    if number is None:
        raise CorruptRecord("a shard's record lacks its commit number")
    return Claim(number, counters), sizes


def frees(mutations: Sequence[Mutation]) -> bool:
    """Whether a commit is one of those that make room, which a full server must not refuse.

    New extents and rows are not. A changed state, an entry of the trash or a stamp belongs to an
    extent that is there, and leads to its removal; a row may shrink.
    """
    for mutation in mutations:
        old: dict[tuple[Table, bytes], int] = {}
        for table, key, expected, whole in mutation.compare:
            if whole and expected is not None:
                old[table, key] = len(expected)
        for table, key, value in mutation.writes:
            if value is None or table not in (Table.EXTENTS, Table.ROWS):
                continue
            if len(value) >= old.get((table, key), 0):
                return False
    return True


def encode_commit(tag: bytes, fence: Fence, mutations: Sequence[Mutation]) -> tuple[bytes, ...]:
    """The command that commits to one shard."""
    tables: dict[int, bytes] = {}
    body: Args = []
    for mutation in mutations:
        _encode_mutation(mutation, tables, body)
    keys = [meta_key(tag), *(table_key(tag, table) for table in tables)]
    sized = b"".join(b"%d" % table if table in SIZED else b"-" for table in tables)
    script = NAMES[FREE if frees(mutations) else COMMIT]
    return (b"EVALSHA", script, b"%d" % len(keys), *keys, encode_fence(fence), sized, *body)


def _encode_mutation(mutation: Mutation, tables: dict[int, bytes], body: Args) -> None:
    head = len(body)
    body += (b"%d" % len(mutation.compare), b"", b"%d" % len(mutation.counters))
    for table, key, expected, whole in mutation.compare:
        how = b"absent" if expected is None else b"whole" if whole else b"prefix"
        body += (_place(table, tables), how, key, expected or b"")
    body[head + 1] = b"%d" % _encode_writes(mutation.writes, tables, body)
    for name, delta in mutation.counters.items():
        body += (name, b"%d" % delta)


def _encode_writes(
    writes: Sequence[tuple[Table, bytes, bytes | None]], tables: dict[int, bytes], body: Args
) -> int:
    """Add runs of writes that are alike; returns how many."""
    if not writes:
        return 0
    kinds, keys, values = zip(*writes, strict=True)
    if len(writes) > 1 and None not in values and len(set(kinds)) == 1:
        # What a grant's rows are, by the thousand: no step per row.
        flat: Args = [b""] * (2 * len(keys))
        flat[::2], flat[1::2] = keys, values
        body += (_place(kinds[0], tables), b"HSET", b"%d" % len(flat))
        body += flat
        return 1
    runs = 0
    for (table, is_put), run in groupby(writes, lambda w: (w[0], w[2] is not None)):
        flat = [part for _, key, value in run for part in (key, value) if part is not None]
        body += (_place(table, tables), b"HSET" if is_put else b"HDEL", b"%d" % len(flat))
        body += flat
        runs += 1
    return runs


def _place(table: int, tables: dict[int, bytes]) -> bytes:
    """Where the table's key stands among the script's keys, from 1; the meta record is first."""
    place = tables.get(table)
    if place is None:
        place = tables[table] = b"%d" % (len(tables) + 2)
    return place
