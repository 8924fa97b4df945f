"""Keys of other servers, each with the values besides null that ask for nothing.

Sources: OpenAI's API reference; the request types of vLLM 0.11 and SGLang 0.5.
"""

from deploy.edge.bodies.body_reader import AbsentKeys

_EMPTY: tuple[object, ...] = ("", [], {})
_SWITCHES = ("use_beam_search", "early_stopping", "include_stop_str_in_output", "no_stop_trim", "return_token_ids",
             "return_tokens_as_token_ids", "return_prompt_text", "return_hidden_states")  # fmt: skip
_VALUES = ("logits_processors", "custom_logit_processor", "custom_params", "guided_whitespace_pattern", "stop_regex",
           "logprob_token_ids", "prompt_embeds", "image_data", "lora_path")  # fmt: skip

COMMON: AbsentKeys = {
    **dict.fromkeys(_SWITCHES, (False,)),
    **dict.fromkeys(_VALUES, _EMPTY),
    **dict.fromkeys(("vllm_xargs", "kv_transfer_params", "session_params"), ({},)),
    **dict.fromkeys(("truncate_prompt_tokens", "input_ids", "input_embeds"), ()),
    "length_penalty": (1,),
    "spaces_between_special_tokens": (True,),
}

CHAT: AbsentKeys = {
    **COMMON,
    **dict.fromkeys(("audio", "chat_template", "documents", "functions", "reasoning"), _EMPTY),
    **dict.fromkeys(("include_reasoning", "separate_reasoning", "stream_reasoning"), (True,)),
    "media_io_kwargs": ({},),
    **dict.fromkeys(("add_special_tokens", "continue_final_message", "echo"), (False,)),  # the template has all special tokens
    "best_of": (1,),
    "function_call": ("", "none", "auto"),
    "modalities": ([], ["text"]),
    "moderation": (),
    "web_search_options": (),
}

COMPLETION: AbsentKeys = {**COMMON, "add_special_tokens": (True,), "suffix": ("",)}  # and a chat's own keys
