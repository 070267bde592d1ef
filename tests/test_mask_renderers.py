"""Our masks beside PrimeIntellect's `renderers`, which writes families by hand; skipped where it is not installed.

Trained runs must be the same, turn by turn, but for what docs/masks.md explains: think marks and white space that a run
begins with, and the token that ends a last turn which the template does not end.
"""

import copy
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from transformers import AutoTokenizer

from benchmarks.mask_score.score import CASES
from sft_play.config.schema import DataConfig
from sft_play.data.masks.render import Renderer
from sft_play.data.masks.token_row import IGNORED, TokenRow
from sft_play.data.sources.formats import Chat
from tests.bundled import template_of, tokenizer_folder

pytestmark = pytest.mark.build

FAMILIES = {
    "trl/qwen3": "qwen3",
    "trl/qwen3_vl": "qwen3-vl",
    "trl/qwen3_5_think": "qwen3.5",
    "trl/qwen3_5_nothink": "qwen3.5",
    "trl/qwen3_6": "qwen3.6",
    "trl/nemotron_3_nano": "nemotron-3",
    "trl/nemotron_3_ultra": "nemotron-3-ultra",
    "trl/glm4moe": "glm-4.5",
    "trl/llama3_1": "llama-3",
    "llama.cpp/GLM-4.6": "glm-4.5",
    "llama.cpp/GLM-5.2": "glm-5.1",
    "llama.cpp/MiniMax-M2": "minimax-m2",
    "llama.cpp/google-gemma-4-31B-it": "gemma4",
}
SETTINGS = {"trl/qwen3_5_think": {"enable_thinking": True}, "trl/qwen3_5_nothink": {"enable_thinking": False}}
NAMES = {"llama.cpp/google-gemma-4-31B-it": "google/gemma-4-31B-it"}
"""Its renderer goes by the name of the model."""
COMPARED = ("single_turn", "multi_turn", "system", "tool_calls", "reasoning", "call_last")
OTHER_TEMPLATE = {("llama.cpp/google-gemma-4-31B-it", "reasoning")}
"""renderers follows a later template, which writes think text in answers too."""
TOKENS = [
    *("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>"),
    *("</tool_response>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "[gMASK]", "<sop>"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<arg_key>", "</arg_key>", "<arg_value>"),
    *("</arg_value>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
    *("<|end_of_text|>", "]~!b[", "]~b]", "[e~[", "<minimax:tool_call>", "</minimax:tool_call>", "<bos>", "<eos>"),
    *("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>"),
    *("<|tool_response>", "<tool_response|>", '<|"|>', "<|think|>", "<|image|>", "<|image>", "<image|>", "<pad>"),
]
_OPENING = re.compile(r"\s*(?:<think>\s*)?(?:</think>|<\|channel>thought\n<channel\|>)?\s*")
"""What a run may begin with in one of the two only."""
_ADDED_END = re.compile(r"(?:<\|endoftext\|>|<\|user\|>|<\|observation\|>)$")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = AutoTokenizer.from_pretrained(tokenizer_folder("Qwen2.5-Instruct"))
    made.add_special_tokens({"additional_special_tokens": TOKENS})
    return made


def runs(tokenizer: Any, ids: Sequence[int], trained: Sequence[bool]) -> Iterator[str]:
    """Trained runs as text, without what the two may differ in."""
    places = [at for at, is_trained in enumerate(trained) if is_trained]
    for at in places:
        if at - 1 not in places:
            last = next(end for end in range(at, len(ids) + 1) if end not in places)
            text = str(tokenizer.decode(ids[at:last]))
            yield _ADDED_END.sub("", text[_OPENING.match(text).end() :])  # type: ignore[union-attr]


@pytest.mark.parametrize("name", FAMILIES)
def test_trained_runs_are_those_of_renderers(tokenizer, name):
    base = pytest.importorskip("renderers.base", reason="renderers is not installed: pip install renderers httpx")
    from renderers import configs

    base._populate_registry()
    tokenizer.name_or_path = NAMES.get(name, "")
    tokenizer.chat_template = template_of(name)
    known = [one for one in vars(configs).values() if isinstance(one, type) and hasattr(one, "model_fields")]
    fields = [(one, one.model_fields["name"].default) for one in known if "name" in one.model_fields]
    config = next(one for one, default in fields if default == FAMILIES[name])
    written = base.RENDERER_REGISTRY[FAMILIES[name]](tokenizer, config(**SETTINGS.get(name, {})))
    renderer = Renderer(tokenizer, DataConfig(on_missing_end="train"), max_seq_len=1 << 30)
    for case in CASES:
        if case.name not in COMPARED or (name, case.name) in OTHER_TEMPLATE:
            continue
        messages = [copy.deepcopy(message) for message in case.messages]
        sample = base.build_training_sample(written, messages, tools=list(case.tools) or None, ensure_final_stop=True)
        row = renderer.render(Chat("f:1", case.messages, case.tools))
        assert isinstance(row, TokenRow), (case.name, row)
        assert row.untrained_turns == 0
        ours = list(runs(tokenizer, row.input_ids, [label != IGNORED for label in row.labels]))
        assert ours == list(runs(tokenizer, sample.token_ids, sample.loss_mask)), case.name
