"""The layouts of `cuda.h` and the calls of the driver, against a stand-in in C that logs what it is called with."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringattn.errors import UnsupportedError
from ringattn.transport.peer.driver import (
    OUT_OF_MEMORY,
    AccessDescription,
    AllocationProp,
    Attribute,
    BatchOperation,
    CudaDriver,
    DriverError,
    WordOperation,
)

COMPILER = shutil.which("cc") or shutil.which("gcc")
SOURCE = Path(__file__).with_name("peers") / "cuda.c"
TWO_MIB = 2 << 20


@pytest.mark.parametrize(
    ("struct", "size", "offsets"),
    [
        (AllocationProp, 32, {"location_type": 8, "win32": 16, "compression": 24, "usage": 26, "reserved": 28}),
        (AccessDescription, 12, {"location_id": 4, "flags": 8}),
        (BatchOperation, 48, {"operation": 0, "address": 8, "value": 16, "flags": 24, "alias": 32}),
    ],
)
def test_structs_have_the_layout_of_the_header(
    struct: type[ctypes.Structure], size: int, offsets: dict[str, int]
) -> None:
    assert ctypes.sizeof(struct) == size
    assert {name: getattr(struct, name).offset for name in offsets} == offsets


class Stub:
    """The stand-in, loaded."""

    def __init__(self, path: str) -> None:
        self.path, self._library = path, ctypes.CDLL(path)
        self._library.stub_log.restype = ctypes.c_char_p

    def lines(self) -> list[str]:
        """What was called since the last look."""
        text = self._library.stub_log().decode().splitlines()
        self._library.stub_clear()
        return text

    def version(self, version: int) -> None:
        self._library.stub_version(version)

    def fail(self, code: int) -> None:
        """Let the next call that can fail do so."""
        self._library.stub_fail(code)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    if COMPILER is None:
        pytest.skip("needs a C compiler")
    made = tmp_path_factory.mktemp("cuda") / "libcuda_stub.so"
    subprocess.run([COMPILER, "-shared", "-fPIC", "-D_GNU_SOURCE", "-o", str(made), str(SOURCE)], check=True)
    return str(made)


@pytest.fixture
def stub(path: str) -> Iterator[Stub]:
    found = Stub(path)
    found.lines()
    yield found
    found.version(13000)


def test_memory_is_created_mapped_exported_and_given_back(stub: Stub) -> None:
    driver = CudaDriver(3, stub.path)
    assert driver.version == 13000 and driver.granularity() == TWO_MIB
    handle = driver.create(TWO_MIB)
    address = driver.map(handle, TWO_MIB)
    fd = driver.export(handle)
    assert not os.get_inheritable(fd)
    assert driver.adopt(fd) == 0xAABB
    os.close(fd)
    driver.unmap(address, TWO_MIB)
    driver.release(handle)
    assert stub.lines() == [
        "granularity 1 1 1 13 1",
        f"create {TWO_MIB} 1 1 1 13 0 0",
        f"reserve {TWO_MIB} 0 0 0",
        f"map 7f0000000000 {TWO_MIB} 0 1122334455667788 0",
        f"access 7f0000000000 {TWO_MIB} 1 13 3 1",
        "export 1122334455667788 1 0",
        f"import {fd} 1",
        f"unmap 7f0000000000 {TWO_MIB}",
        f"unreserve 7f0000000000 {TWO_MIB}",
        "release 1122334455667788",
    ]


def test_streams_are_given_copies_and_word_operations(stub: Stub) -> None:
    driver = CudaDriver(0, stub.path)
    assert driver.register(4096, 8192) == 8192
    driver.unregister(4096)
    driver.copy(0x7F0000000001, 0x7F0000000002, 5 << 32, 0x55)
    driver.operate(
        [WordOperation(False, 1 << 60, 1 << 62), WordOperation(True, 8, 9), WordOperation(True, 16, 7, True)], 5
    )
    driver.operate([WordOperation(False, 8, 1)] * 300, 5)
    assert stub.lines() == [
        "register 8192 3", "address 0", "unregister",
        f"copy 7f0000000001 7f0000000002 {5 << 32} 55",
        "batch 5 3 0", "op 5 1000000000000000 4000000000000000 0", "op 4 8 9 0", f"op 4 10 7 {1 << 30}",
        "batch 5 255 0", *3 * ["op 5 8 1 0"], "batch 5 45 0", *3 * ["op 5 8 1 0"],
    ]  # fmt: skip


def test_a_device_says_what_it_can_and_whether_it_is_a_part(stub: Stub) -> None:
    driver = CudaDriver(3, stub.path)
    assert driver.attribute(Attribute.STREAM_MEMORY_OPERATIONS_64) == 122
    assert stub.lines() == ["attribute 122 13"]
    assert driver.is_partition()  # the stand-in answers 7 for the whole GPU and 13 for this device
    assert not CudaDriver(-3, stub.path).is_partition()


def test_a_failed_call_is_named_and_undone(stub: Stub) -> None:
    driver = CudaDriver(0, stub.path)
    stub.fail(OUT_OF_MEMORY)
    with pytest.raises(DriverError, match=r"cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY \(2\): words") as caught:
        driver.create(TWO_MIB)
    assert caught.value.code == OUT_OF_MEMORY
    stub.fail(101)
    with pytest.raises(DriverError, match="cuMemSetAccess"):
        driver.map(5, TWO_MIB)
    assert stub.lines()[-2:] == [f"unmap 7f0000000000 {TWO_MIB}", f"unreserve 7f0000000000 {TWO_MIB}"]


def test_no_driver_and_an_old_one_are_refused(stub: Stub) -> None:
    with pytest.raises(UnsupportedError, match="no CUDA driver"):
        CudaDriver(0, "libno_such_cuda.so.1")
    stub.version(11080)
    with pytest.raises(UnsupportedError, match=r"version 11\.8, and 12\.0 is needed"):
        CudaDriver(0, stub.path)
