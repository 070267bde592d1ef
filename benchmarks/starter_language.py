"""The starter task's language: a pre-training corpus and house commands with their answers, from a seed.

A bare CPU machine has no base model to fine-tune and no data to fine-tune it on. This module writes both
texts from a small grammar about one house (its rooms, people, days, numbers), so that a model of about two
million parameters can be pre-trained in five minutes and then fine-tuned in three, on two cores:

- `corpus_documents` is what the base model reads: diaries of the house, and chats in which the assistant
  notes what it was told (`note room attic day monday`). From them the base model learns the words, to speak
  in turns, and to find a value in a sentence and copy it. No action name stands here.
- `chat_rows` is what fine-tuning teaches: house commands, direct ("could you turn on the light in the
  porch") or hinted ("it is too dark in the porch"), answered with an action and the values it needs
  (`light.on room porch`, `heat.set room attic degrees 21`).

Two million parameters and under a million tokens learn to copy only if the text makes it easy. Three choices
below do: a value always follows a space, so that it is the same token wherever it stands; the name of a slot
stands directly before its value, so that this one token says what to look for; and some chats hold loose
values alone, every slot equally often. Copying is learned slot by slot, each at a sudden: from sentences,
whose wording gives the place away, two slots of nine were not yet copied after 700,000 tokens.

What is held out is new: no validation or test prompt repeats the wording and values of a training row behind
another "please", some wordings occur in validation and test only, and the corpus is written from other
sentences than the commands, so that none of the held-out prompts stands in it.

Everything comes from `random.Random(seed)` and the tuples below, never from the order of a set or a hash:
the same seed gives the same text on every machine.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ACTIONS", "DEFAULT_SEED", "SPECIAL_TOKENS", "chat_rows", "corpus_documents", "normalised"]

Row = dict[str, list[dict[str, str]]]  # {"messages": [{"role": ..., "content": ...}, ...]}

DEFAULT_SEED = 7
SPLIT_SIZES = {"train": 2600, "val": 100, "test": 300}
HELD_OUT_SHARE = 0.2  # of the commands of every action
UNSEEN_WORDING_SHARE = 0.2  # of the validation and test rows
END_OF_TEXT, TURN_START, TURN_END = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

# The values a slot can take: few, so that each is frequent enough to become one token and to be learned.
VALUES: dict[str, tuple[str, ...]] = {
    "person": ("ana", "ben", "cleo", "finn", "hugo", "lena"),
    "room": ("attic", "bathroom", "bedroom", "cellar", "kitchen", "library", "office", "porch"),
    "door": ("front", "back", "side", "garden"),
    "style": ("jazz", "rock", "folk", "blues", "opera"),
    "item": ("milk", "bread", "rice", "tea", "soap", "butter", "honey", "cheese"),
    "degrees": ("17", "18", "19", "21", "22", "23"),
    "minutes": ("5", "10", "15", "30", "45"),
    "hour": ("6", "7", "8", "9", "11"),
    "day": ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"),
}


@dataclass(frozen=True)
class Action:
    """One thing the house can do: its slots, and the wordings that ask for it."""

    slots: tuple[str, ...]  # the answer names them in the order of VALUES
    orders: tuple[str, ...]  # imperatives, which "could you" may precede
    hints: tuple[str, ...]  # statements and questions that mean the same
    unseen: tuple[str, ...]  # imperatives kept for validation and test


ACTIONS: dict[str, Action] = {
    "light.on": Action(
        ("room",),
        ("turn on the light in the {room}", "switch on the {room} light", "switch the light in the {room} on",
         "make it bright in the {room}", "light up the {room}"),
        ("it is too dark in the {room}", "i can not see a thing in the {room}", "the {room} needs some light",
         "why is it so dark in the {room}", "i would like some light in the {room}"),
        ("turn the {room} light on",),
    ),
    "light.off": Action(
        ("room",),
        ("turn off the light in the {room}", "switch off the {room} light",
         "switch the light in the {room} off", "make it dark in the {room}",
         "put out the light in the {room}"),
        ("it is too bright in the {room}", "nobody needs the light in the {room}",
         "the {room} light should be off", "the light in the {room} is still on for nobody"),
        ("turn the {room} light off",),
    ),
    "heat.set": Action(
        ("room", "degrees"),
        ("set the heating in the {room} to {degrees} degrees", "heat the {room} to {degrees} degrees",
         "make the {room} {degrees} degrees warm", "bring the {room} to {degrees} degrees"),
        ("i want {degrees} degrees in the {room}", "the {room} should have {degrees} degrees",
         "we need it {degrees} degrees warm in the {room}"),
        ("set the {room} heating to {degrees} degrees",),
    ),
    "fan.on": Action(
        ("room",),
        ("turn on the fan in the {room}", "switch on the {room} fan", "start the fan in the {room}",
         "let some fresh air into the {room}", "cool the {room} with the fan"),
        ("it is too hot in the {room}", "there is no fresh air in the {room}",
         "the {room} needs some fresh air", "i am melting in the {room}"),
        ("turn the {room} fan on",),
    ),
    "blinds.open": Action(
        ("room",),
        ("open the blinds in the {room}", "raise the {room} blinds", "pull up the blinds in the {room}",
         "let the sun into the {room}"),
        ("i want to see the sun from the {room}", "the {room} blinds should be open",
         "why are the blinds in the {room} still down"),
        ("open the {room} blinds",),
    ),
    "robot.start": Action(
        ("room",),
        ("clean the floor of the {room}", "vacuum the {room}", "send the robot to the {room}",
         "start the robot in the {room}", "clean up in the {room}"),
        ("there is dust all over the {room}", "the floor of the {room} is dirty", "the {room} looks dirty"),
        ("clean the {room} floor",),
    ),
    "music.play": Action(
        ("style", "room"),
        ("play {style} in the {room}", "put on some {style} in the {room}",
         "start the {style} music in the {room}", "fill the {room} with {style}"),
        ("i want to hear {style} in the {room}", "how about some {style} in the {room}",
         "the {room} needs some {style} music"),
        ("play some {style} music in the {room}",),
    ),
    "music.stop": Action(
        ("room",),
        ("stop the music in the {room}", "turn off the music in the {room}", "switch off the {room} music",
         "make the music in the {room} stop"),
        ("the music in the {room} is too loud", "i have heard enough music in the {room}",
         "nobody needs the music in the {room}"),
        ("turn the {room} music off",),
    ),
    "door.lock": Action(
        ("door",),
        ("lock up the {door} door", "close the {door} door with the key",
         "make sure that the {door} door is locked", "shut the lock of the {door} door"),
        ("the {door} door should be locked", "nobody should come in at the {door} door",
         "i forgot to lock the {door} door", "why is the {door} door not locked"),
        ("turn the key at the {door} door",),
    ),
    "alarm.set": Action(
        ("hour", "day"),
        ("wake me at {hour} on {day}", "set an alarm for {hour} on {day}", "ring at {hour} on {day}",
         "get me out of bed at {hour} on {day}"),
        ("i have to get up at {hour} on {day}", "on {day} i must be awake at {hour}",
         "i can not sleep longer than {hour} on {day}"),
        ("set the alarm on {day} for {hour}",),
    ),
    "timer.start": Action(
        ("minutes",),
        ("start a timer for {minutes} minutes", "count down {minutes} minutes",
         "tell me when {minutes} minutes are over", "set a timer to {minutes} minutes",
         "ring in {minutes} minutes"),
        ("the cake needs {minutes} minutes in the oven", "i need to know when {minutes} minutes have passed",
         "the eggs have to cook for {minutes} minutes"),
        ("set the timer for {minutes} minutes",),
    ),
    "list.add": Action(
        ("item",),
        ("put {item} on the shopping list", "add {item} to the list", "write down that we need {item}",
         "write {item} on the shopping list", "order some {item}"),
        ("we have no more {item}", "we are out of {item}", "we need to buy {item}",
         "there is no {item} left"),
        ("put some {item} on the list",),
    ),
    "call.start": Action(
        ("person",),
        ("call {person}", "phone {person}", "ring up {person}", "get {person} on the phone",
         "start a call with {person}"),
        ("i want to talk to {person}", "i have to speak with {person} on the phone",
         "i would like to hear the voice of {person}"),
        ("start a phone call with {person}",),
    ),
    "visit.add": Action(
        ("person", "day"),
        ("note that {person} will visit us on {day}", "write down that {person} comes on {day}",
         "put the visit of {person} on {day} in the calendar", "expect {person} on {day}"),
        ("i hear that {person} will be our guest on {day}", "on {day} we have {person} for dinner",
         "i think that {person} wants to see us on {day}"),
        ("write down the visit of {person} on {day}",),
    ),
}  # fmt: skip

ORDER_OPENINGS = (
    "", "", "please ", "hey, ", "could you ", "can you please ", "i want you to ", "would you kindly ",
)  # fmt: skip
HINT_OPENINGS = ("", "", "", "hey, ", "oh, ", "hello house, ", "excuse me, ", "you know, ")
ORDER_CLOSINGS = ("", "", "", " now", " please", " thank you")
HINT_CLOSINGS = ("", "", "", " again", " as you know", " thank you")

# What the base model reads: sentences about the house, none of them a command.
FACTS = (
    "on that day {person} was in the {room}",
    "we saw that {person} went to the {room} at {hour}",
    "on {day} our {person} slept in the {room}",
    "the {room} was cold, only {degrees} degrees",
    "in the {room} there were {degrees} degrees on {day}",
    "little {person} found {degrees} degrees in the {room} nice and warm",
    "somebody left the light of the {room} on until {hour}",
    "the fan of the {room} was off on {day}",
    "the blinds of the {room} were open on {day}",
    "then {person} closed the blinds of the {room} at {hour}",
    "then {person} heard {style} music from the {room}",
    "the {style} that {person} likes was heard in the {room}",
    "on {day} there was a {style} evening in the {room}",
    "the {door} door was locked at {hour}",
    "our friend {person} came in at the {door} door on {day}",
    "our friend {person} had a key for the {door} door",
    "poor {person} got up at {hour} on {day}",
    "the alarm rang at {hour} on {day}",
    "after lunch {person} slept for {minutes} minutes in the {room}",
    "the timer ran for {minutes} minutes",
    "our guest {person} waited {minutes} minutes at the {door} door",
    "they say that {person} bought {item} on {day}",
    "there was {item} in the {room}",
    "at {hour} little {person} asked for {item}",
    "some {item} was on the list of {person}",
    "our friend {person} phoned on {day} at {hour}",
    "our guest on {day} was {person}",
    "the visit of {person} was at {hour}",
    "the robot cleaned the {room} for {minutes} minutes",
    "the floor of the {room} was clean on {day}",
    "then {person} carried the {item} to the {room}",
    "dust lay in the {room} until {day}",
    "most days {person} likes to turn on the lamp of the {room}",
    "our friend {person} forgot to switch off the lamp of the {room}",
    "it was too dark, so {person} put some more light into the {room}",
    "the sun made the {room} too bright and too hot, said {person}",
    "i can not see a thing, said {person} when it was dark in our {room}",
    "they had to start the fan, the air in the {room} was not fresh on {day}",
    "they set the heating of the {room}, now it is {degrees} degrees warm",
    "we want it {degrees} degrees warm, said {person} on {day}",
    "heat makes me happy, said {person} at {degrees} degrees",
    "please bring some {item}, said {person}, we need to buy it",
    "there was no more {item} left on {day}, so we had to order it",
    "no bread and no {item} here, add it to what we are out of, said {person}",
    "they wrote {item} on the shopping list at {hour}",
    "would you open and raise the blinds of the {room}, said {person}",
    "they pull down and lower the blinds of the {room} at {hour}, so people can not look in",
    "we should keep the sun out of our {room}, said {person}",
    "the floor was dirty, so the robot should clean our {room} on {day}",
    "send the robot to vacuum our {room} for {minutes} minutes",
    "the {style} music was too loud, it had to stop at {hour}",
    "how about some {style} again, said {person}, let us play it",
    "i would like to hear {style} music now, said {person}",
    "i have enough of {style}, said {person} in the {room}",
    "can you lock it with the key, said {person} at the {door} door",
    "i forgot to unlock it, said {person} at the {door} door on {day}",
    "nobody waits at the {door} door, is it locked or unlocked",
    "a friend stands without a key at the {door} door on {day}",
    "the alarm has to wake me and ring at {hour}, said {person}",
    "i must get up and be awake at {hour} on {day}",
    "the cake was in the oven for {minutes} minutes on {day}",
    "start to count down, {minutes} minutes have passed, said {person}",
    "tell me when the timer is over, it is set to {minutes} minutes",
    "i want to talk and speak, said {person} on the phone on {day}",
    "could you call me, said the voice of {person} on {day}",
    "note that we expect {person}, who wants to visit us for dinner on {day}",
    "write down who comes, it will be {person} on {day}",
    "the calendar says that {person} was our guest on {day}",
    "thank you, hello, excuse me, said {person} at {hour}",
    "oh, hey, you know, do it at once, said {person} in the {room}",
)
QUESTIONS: dict[str, tuple[str, ...]] = {
    "person": ("who was it?", "which person?"),
    "room": ("where was it?", "which room?"),
    "door": ("which door?",),
    "style": ("which music?",),
    "item": ("what thing?",),
    "degrees": ("how warm?", "how many degrees?"),
    "minutes": ("how long?", "how many minutes?"),
    "hour": ("what time?", "which hour?"),
    "day": ("when was it?", "which day?"),
}

_FIELD = re.compile(r"\{(\w+)\}")


def normalised(text: str) -> str:
    """The text in lower case with single spaces: two texts alike in this form count as the same."""
    return " ".join(text.lower().split())


def corpus_documents(*, seed: int, count: int = 20_000) -> list[str]:
    """The documents of the pre-training corpus; chats are written out with the special tokens."""
    rng = random.Random(f"corpus {seed}")  # a stream apart from the rows': another count of documents changes none
    writers = (_diary, _repeat_chat, _question_chat, _note_chat, _sorting_chat)
    return [writer(rng) for writer in rng.choices(writers, weights=(30, 5, 10, 30, 25), k=count)]


def chat_rows(*, seed: int) -> dict[str, list[Row]]:
    """The rows for fine-tuning: splits "train", "val" and "test", every prompt different."""
    rng = random.Random(f"chat {seed}")
    known, held_out = _divided_commands(rng)
    taken: set[str] = set()
    return {
        "train": _rows(rng, known, SPLIT_SIZES["train"], taken),
        "val": _rows(rng, held_out, SPLIT_SIZES["val"], taken),
        "test": _rows(rng, held_out, SPLIT_SIZES["test"], taken),
    }


# --- The corpus ---------------------------------------------------------------------------------------------


def _fact(rng: random.Random) -> tuple[str, dict[str, str]]:
    slot = rng.choice(list(VALUES))  # first, so that every slot is practised equally often
    return _filled(rng, rng.choice([fact for fact in FACTS if f"{{{slot}}}" in fact]))


def _diary(rng: random.Random) -> str:
    """A plain document: facts, each with its values noted after it."""
    entries = []
    for _ in range(rng.randint(2, 4)):
        fact, values = _fact(rng)
        entries.append(f"{fact}. note {_note(values)}.")
    return "\n".join(entries)


def _repeat_chat(rng: random.Random) -> str:
    fact, _ = _fact(rng)
    return _chat([(fact, f"again: {fact}")])


def _question_chat(rng: random.Random) -> str:
    """A chat of a fact and one question for each value in it."""
    fact, values = _fact(rng)
    asked = rng.sample(list(values), k=len(values))
    turns = [(rng.choice(QUESTIONS[slot]), f"note {_note({slot: values[slot]})}") for slot in asked]
    return _chat([(f"{fact}. {turns[0][0]}", turns[0][1]), *turns[1:]])


def _note_chat(rng: random.Random) -> str:
    fact, values = _fact(rng)
    return _chat([(fact, f"note {_note(values)}")])


def _sorting_chat(rng: random.Random) -> str:
    """A chat in which the assistant notes loose values, each behind the name of its slot."""
    values = {slot: rng.choice(VALUES[slot]) for slot in rng.sample(list(VALUES), k=rng.randint(4, 6))}
    return _chat([(f"sort {' '.join(values.values())}", f"note {_note(values)}")])


def _chat(turns: Sequence[tuple[str, str]]) -> str:
    return "".join(_turn("user", said) + _turn("assistant", answer) for said, answer in turns)


def _turn(role: str, content: str) -> str:
    return f"{TURN_START}{role}\n{content}{TURN_END}\n"


def _note(values: Mapping[str, str]) -> str:
    """The values as `slot value`, in the order of the table."""
    return " ".join(f"{slot} {values[slot]}" for slot in VALUES if slot in values)


def _filled(rng: random.Random, sentence: str) -> tuple[str, dict[str, str]]:
    """The sentence with a random value in every slot, and those values."""
    values = {slot: rng.choice(VALUES[slot]) for slot in _FIELD.findall(sentence)}
    return sentence.format_map(values), values


# --- The commands -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Command:
    """A command without opening and closing, and its answer."""

    text: str
    answer: str
    is_order: bool


_Pool = dict[str, list[list[_Command]]]  # for each action: the commands, and those in unseen wordings


def _divided_commands(rng: random.Random) -> tuple[_Pool, _Pool]:
    """All commands in two pools without a common one: to train on, and held out."""
    known: _Pool = {}
    held_out: _Pool = {}
    for name, action in ACTIONS.items():
        commands = list(_commands(name, action, action.orders, is_order=True))
        commands.extend(_commands(name, action, action.hints, is_order=False))
        rng.shuffle(commands)
        cut = int(len(commands) * HELD_OUT_SHARE)
        known[name] = [commands[cut:], []]
        held_out[name] = [commands[:cut], list(_commands(name, action, action.unseen, is_order=True))]
    return known, held_out


def _commands(name: str, action: Action, wordings: Iterable[str], *, is_order: bool) -> Iterator[_Command]:
    """Every wording with every combination of values."""
    for wording in wordings:
        for combination in itertools.product(*(VALUES[slot] for slot in action.slots)):
            values = dict(zip(action.slots, combination, strict=True))
            answer = f"{name} {_note(values)}"
            yield _Command(wording.format_map(values), answer, is_order)


def _rows(rng: random.Random, pool: _Pool, count: int, taken: set[str]) -> list[Row]:
    """Rows with prompts that are not taken yet, every action about equally often."""
    rows: list[Row] = []
    while len(rows) < count:
        usual, unseen = pool[rng.choice(list(pool))]
        command = rng.choice(unseen if unseen and rng.random() < UNSEEN_WORDING_SHARE else usual)
        prompt = _prompt(rng, command)
        if normalised(prompt) not in taken:
            taken.add(normalised(prompt))
            rows.append(_row(prompt, command.answer))
    return rows


def _prompt(rng: random.Random, command: _Command) -> str:
    if command.is_order:
        return rng.choice(ORDER_OPENINGS) + command.text + rng.choice(ORDER_CLOSINGS)
    return rng.choice(HINT_OPENINGS) + command.text + rng.choice(HINT_CLOSINGS)


def _row(prompt: str, answer: str) -> Row:
    return {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}


FOLDER = Path("sft_play/starter/data")


def bundled_files() -> dict[Path, str]:
    """Path below the repository and text of each bundled file: written by `make -C benchmarks generate`."""
    return {
        FOLDER / f"{split}.jsonl": "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        for split, rows in chat_rows(seed=DEFAULT_SEED).items()
    }
