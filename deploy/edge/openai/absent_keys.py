"""Keys that a chat or a text completion has at other servers and not here, to the values that ask for nothing, beside null.

Sources: OpenAI's API reference; the request types of vLLM 0.11 and SGLang 0.5.
"""

from typing import Any

from deploy.edge.body_reader import AbsentKeys

_EMPTY: tuple[Any, ...] = ("", [], {})

COMMON: AbsentKeys = {
    # sampling
    "length_penalty": (1,),
    "logits_processors": _EMPTY,
    "custom_logit_processor": _EMPTY,
    "custom_params": _EMPTY,
    "vllm_xargs": ({},),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    # structured output
    "guided_whitespace_pattern": _EMPTY,
    # stopping, and what is shown
    "stop_regex": _EMPTY,
    "include_stop_str_in_output": (False,),
    "no_stop_trim": (False,),
    "spaces_between_special_tokens": (True,),
    "logprob_token_ids": _EMPTY,
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "return_prompt_text": (False,),
    "return_hidden_states": (False,),
    # the prompt
    "truncate_prompt_tokens": (),
    "input_ids": (),
    "input_embeds": (),
    "prompt_embeds": _EMPTY,
    "image_data": _EMPTY,
    # the model
    "lora_path": _EMPTY,
    "kv_transfer_params": ({},),
    "session_params": ({},),
}

CHAT: AbsentKeys = {
    **COMMON,
    "add_special_tokens": (False,),  # the template has them all
    "audio": _EMPTY,
    "best_of": (1,),
    "chat_template": _EMPTY,
    "continue_final_message": (False,),
    "documents": _EMPTY,
    "echo": (False,),
    "function_call": ("", "none", "auto"),
    "functions": _EMPTY,
    "include_reasoning": (True,),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": ([], ["text"]),
    "reasoning": _EMPTY,
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "web_search_options": (),
}

COMPLETION: AbsentKeys = {
    **COMMON,
    "add_special_tokens": (True,),
    "suffix": ("",),
    "thinking_token_budget": (),
}
