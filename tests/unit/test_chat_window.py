"""Which messages stay when a conversation outgrows the context."""

import pytest

from llmpy.text.chat_window import fitted, prompt_room

SYSTEM = {"role": "system", "content": "s"}


def turn(i, tools=False):
    called = [{"role": "assistant", "content": "c"}, {"role": "tool", "content": "t"}] if tools else []
    return [{"role": "user", "content": f"u{i}"}, *called, {"role": "assistant", "content": f"a{i}"}]


TALK = [SYSTEM, *turn(0), *turn(1, tools=True), *turn(2), {"role": "user", "content": "last"}]


@pytest.mark.parametrize(
    ("most", "dropped"),
    [(100, 0), (10, 0), (9, 2), (8, 2), (7, 6), (4, 6), (3, 8), (2, 8), (0, 8)],
)
def test_the_oldest_turns_go_whole(most, dropped):
    kept = fitted(TALK, len, most)
    assert kept == [SYSTEM, *TALK[1 + dropped :]]
    assert kept[1]["role"] == "user" and kept[-1] == TALK[-1]


def test_no_more_goes_than_has_to():
    talk = [message for i in range(50) for message in turn(i)]
    for most in range(2, 101):
        assert len(fitted(talk, len, most)) == most // 2 * 2


def test_what_cannot_be_shortened_stays():
    for talk in ([], [SYSTEM], [SYSTEM, *turn(0)], turn(0), [{"role": "assistant", "content": "hi"}]):
        assert fitted(talk, len, 0) == talk


def test_a_short_talk_is_counted_once_and_a_long_one_seldom():
    counted = []
    talk = [message for i in range(1000) for message in turn(i)]

    def count(messages):
        counted.append(len(messages))
        return len(messages)

    assert fitted(talk, count, 10**6) == talk and len(counted) == 1
    fitted(talk, count, 100)
    assert len(counted) < 15


def test_an_answer_has_room():
    assert [prompt_room(128, most) for most in (None, 16, 512)] == [96, 112, 96]
