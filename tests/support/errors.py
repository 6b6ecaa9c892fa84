# SPDX-License-Identifier: Apache-2.0
"""What every error about bad input has."""


def assert_four_parts(error, field):
    """Field, expected, got, and what to do."""
    message = str(error.value)
    assert message.startswith(field), message
    assert ": expected " in message
    assert ", got " in message
    assert message.split(". ", 1)[1].strip()  # what to do
