"""Messages, and a tokenizer that knows the names of every chat template."""

import json

from minirl.bpe import byte_characters
from minirl.tokenizer import load_tokenizer


def user(content):
    return {"role": "user", "content": content}


def assistant(content="", **more):
    return {"role": "assistant", "content": content, **more}


def system(content):
    return {"role": "system", "content": content}


def tool(content):
    return {"role": "tool", "content": content}


def call(name="add", arguments=None):
    return {"type": "function", "function": {"name": name, "arguments": {"a": 2} if arguments is None else arguments}}


TOOLS = [{"type": "function",
          "function": {"name": "add", "description": 'é "q" <x>', "parameters": {"type": "object"}}}]


def golden(shared, name):
    return json.loads((shared / "golden" / "chat" / name).read_text(encoding="utf-8"))


TEXTS = ["", "Hi", " Hi ", "\nx\n", "  ", "é😀", "<think>\nhm\n</think>\n\nans", "<think></think>x", "x</think>",
         "\n</think>\n\ny", "<tool_response>a</tool_response>", '{"a": 1}', "\u00a0b\u00a0", "'\"&<b>", "<|im_end|>",
         [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]]


def conversations(rng, template, count, texts=TEXTS):
    """Random conversations of all shapes that are allowed: messages, tools, add_generation_prompt, enable_thinking."""
    for _ in range(count):
        messages = [system(rng.choice(texts)) for _ in range(rng.choice([0, 1, 1, 2]))]
        for _ in range(rng.randint(1, 5)):
            last = messages[-1] if messages else {"role": ""}
            role = rng.choice(["user", "user", "assistant"])
            if last.get("tool_calls"):
                messages += [tool(rng.choice(texts)) for _ in range(rng.randint(1, len(last["tool_calls"])))]
            elif role == "user" or last["role"] == "assistant":
                messages.append(user(rng.choice(texts)))
            else:
                messages.append(assistant(rng.choice(texts)))
                if rng.random() < 0.5:
                    many = 1 if template == "llama3_1" else rng.randint(1, 3)
                    messages[-1]["tool_calls"] = [call("f", rng.choice([{}, {"s": 'é"\n'}, '{"a":1}']))
                                                  for _ in range(many)]
                if rng.random() < 0.3:
                    messages[-1]["reasoning_content"] = rng.choice(["", "\nplan\n", "\n"])
        yield messages, rng.choice([None, TOOLS]), rng.random() < 0.5, rng.random() < 0.7


CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>",
           "<|end_header_id|>", "<|eot_id|>"]
WORDS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]


def chat_tokenizer(folder, words_are_control=False):
    """Bytes, two merges ("\\n" + "\\n" and "4" + "2"), and the names that the templates use."""
    characters = byte_characters()
    newline = characters[ord("\n")]
    vocab = {character: byte for byte, character in enumerate(characters)} | {newline * 2: 256, "42": 257}
    level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False, "trim_offsets": False}
    added = [{"id": 300 + i, "content": name, "special": True} for i, name in enumerate(CONTROL)]
    added += [{"id": 400 + i, "content": name, "special": words_are_control} for i, name in enumerate(WORDS)]
    (folder / "tokenizer.json").write_text(json.dumps({
        "added_tokens": added, "normalizer": None, "pre_tokenizer": level, "decoder": level, "post_processor": None,
        "model": {"type": "BPE", "vocab": vocab, "merges": [[newline, newline], ["4", "2"]]}}))
    return load_tokenizer(folder)
