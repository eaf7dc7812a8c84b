"""Numbers with units are parsed and formatted as users write them."""

import pytest

from varuna.units import format_bytes, parse_bytes


def test_file_sizes_are_parsed() -> None:
    sizes = [parse_bytes(text) for text in ("5GB", "1.5 mb", "2GiB", "700")]
    assert sizes == [5 * 10**9, 1500000, 2**31, 700]


@pytest.mark.parametrize("text", ["", "GB", "0MB", "-1GB", "5 apples"])
def test_an_invalid_file_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a size must be a number with a unit"):
        parse_bytes(text)


def test_file_sizes_are_formatted() -> None:
    texts = [format_bytes(number) for number in (0, 999, 1500, 2.5e8, 7e12)]
    assert texts == ["0 bytes", "999 bytes", "1.5 kB", "250 MB", "7.0 TB"]
