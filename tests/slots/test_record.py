"""Files that an earlier version wrote: two of them, byte for byte, and what host memory makes of them."""

import io
import subprocess
import sys
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from slotcache.slots.host import HostMemory
from slotcache.slots.prefix_tree import PrefixTree
from slotcache.slots.radix import CopySizes
from slotcache.slots.record import Record
from slotcache.slots.scope import Scope
from slotcache.slots.snapshots import Snapshots
from slotcache.slots.store.record_file import MOST_COST, MOST_USES, Provenance, encode, read
from support.record_files import head_of, resealed

S = Scope.shared("s")
HERE = Provenance("0" * 32, "1" * 32)
TOKENS = np.arange(7, dtype=np.int32)
RUN = Record(S, TOKENS[:4], 0, np.arange(4, dtype=np.uint8), frequency=2, token_cost=0.5)
STATE = Record(
    S,
    TOKENS,
    4,
    np.arange(3, dtype=np.uint8),
    documents=(("d", 4),),
    frequency=3,
    token_cost=0.25,
    state=np.arange(5, dtype=np.uint8),
)
RUN_FILE = (
    b"slotcache KV 3\n\x10\x01\x00\x00\xe1G\xe1\x8b+\x17V\x02r\xe2\xdc&\x8a\xe6\xedb"
    b'{"model":"00000000000000000000000000000000","settings":"11111111111111111111111111111111","scope":"s","start":0,'
    b'"tokens":4,"size":4,"documents":[],"frequency":2,"token_cost":0.5,"path":"5211a8db825216270898ce701a11e56c",'
    b'"data":"eb70bf5fc779e9e6a6111d53e80a3db5","state":0}'
    b"\x00\x00\x00\x00\x01\x00\x00\x00\x02\x00\x00\x00\x03\x00\x00\x00"
    b"\x00\x01\x02\x03"
)
STATE_FILE = (
    b"slotcache KV 3\n\x18\x01\x00\x00HQ\xad\xd0\xd2]\xd6\xcd\x00h\xb4\xf1\xd4\xde\xccg"
    b'{"model":"00000000000000000000000000000000","settings":"11111111111111111111111111111111","scope":"s","start":4,'
    b'"tokens":7,"size":8,"documents":[["d",4]],"frequency":3,"token_cost":0.25,"path":"d43be5851779f0db8a0dfffbaae2fde7",'
    b'"data":"d6951adee311d602d679326496c17f09","state":5}'
    b"\x00\x00\x00\x00\x01\x00\x00\x00\x02\x00\x00\x00\x03\x00\x00\x00\x04\x00\x00\x00\x05\x00\x00\x00\x06\x00\x00\x00"
    b"\x00\x01\x02\x00\x01\x02\x03\x04"
)


@pytest.mark.parametrize(("record", "file"), [(RUN, RUN_FILE), (STATE, STATE_FILE)])
def test_a_record_is_written_as_it_always_was(record, file):
    assert b"".join(bytes(part) for part in encode(record, HERE)) == file


def opened(file):
    return read(io.BytesIO(file), len(file), HERE)


def test_what_a_file_says_of_its_worth_is_bounded():
    head = msgspec.json.decode(head_of(RUN_FILE)) | {"frequency": (1 << 53) - 1, "token_cost": 1e6}
    record = opened(resealed(RUN_FILE, msgspec.json.encode(head)))
    assert (record.frequency, record.token_cost) == (MOST_USES, MOST_COST)
    again = opened(b"".join(bytes(part) for part in encode(replace(RUN, frequency=1 << 60, token_cost=1e9), HERE)))
    assert (again.frequency, again.token_cost) == (MOST_USES, MOST_COST)


def test_a_run_goes_through_host_memory_unchanged():
    tree = PrefixTree(10, 4, HostMemory(4))
    assert tree.host.put(opened(RUN_FILE), "disk")
    (node,) = tree.host.nodes
    record = tree.host.get(node)
    assert record is not None and b"".join(bytes(part) for part in encode(record, HERE)) == RUN_FILE


def test_a_state_goes_through_host_memory_with_its_run_and_its_documents():
    states = Snapshots(PrefixTree(10, 4), HostMemory(12, sizes=CopySizes(run_token=1, state=5)))
    assert states.host.put(opened(RUN_FILE), "disk") and states.host.put(opened(STATE_FILE), "disk")
    node = states.longest(S, TOKENS)
    record = states.host.get(node) if node else None
    assert record is not None and record.state is not None and states.host.num_bytes == 12
    assert record.documents == STATE.documents and record.frequency == STATE.frequency and record.start == 4
    assert record.data.tolist() == [0, 1, 2] and record.state.tolist() == [0, 1, 2, 3, 4]


FIRST_READS = """
import io, sys, threading, time, typing
from slotcache.slots.store.record_file import read
from slotcache.slots.store.record_file import Provenance

def slow(self):
    time.sleep(0.05)  # as if the interpreter turned to another thread here
    return known(self)

file, typing._AnnotatedAlias.__hash__, known = bytes.fromhex(sys.argv[1]), slow, typing._AnnotatedAlias.__hash__
threads = [
    threading.Thread(target=lambda: print(len(read(io.BytesIO(file), len(file), Provenance("0" * 32, "1" * 32)).tokens)))
    for _ in range(4)
]
for thread in threads:
    thread.start()
    time.sleep(0.02)
for thread in threads:
    thread.join()
"""


def test_the_first_records_of_a_process_may_be_read_by_several_threads_at_once():
    """In a process of its own: msgspec 0.22 ended it, a null pointer, where two threads first decoded a struct."""
    command = [sys.executable, "-c", FIRST_READS, STATE_FILE.hex()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["7"] * 4), done.stderr
