"""What a request is to the engine: its prompt's tokens, its sampling, the grammar of its reply, each within the limits."""

import secrets
from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from deploy.edge.logit_keys import check_ids, forbid, logit_adjustments
from deploy.edge.openai.schemas import ChatRequest, CompletionRequest, Sampling
from deploy.edge.raw_json import not_null
from deploy.edge.service_settings import ServiceSettings
from deploy.edge.text_pool import TextPool
from engine.errors import InvalidRequest, ModelNotFound, Overloaded
from engine.front.constraints import Constraints, ToolChoice
from engine.front.generation import Job
from engine.front.grammar import Thought, grammar
from engine.front.grammar_check import GrammarCheck
from engine.front.reply import Markers
from engine.front.template import characters
from engine.front.text import TextProcessor
from engine.front.tools import Tools
from engine.logit_adjustments import LogitAdjustments
from engine.protocol import MAX_ALTERNATIVES, Grammar, SamplingParams

CALL_TOKENS = ("<|tool_call>", "<|tool_response>")  # not to come with tool_choice none, where tools stay declared in the prompt
MAX_PROMPT_LOGPROBS = 1 << 18  # of a request, alternatives counted: some 70 bytes of JSON each
MAX_CHOICES = 64  # of a request, all its prompts together
CHARACTERS_A_TOKEN = 16  # on an average over a prompt, at most
COUNTED_CONTEXTS = 2  # contexts: a longer prompt is not even counted
COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions
_SEED_BITS = 63
_MIX = 0x9E3779B97F4A7C15  # apart: neighbouring choices must not share noise


class JobBuilder:
    """Makes jobs for one served model; `pool`: does what takes a while."""

    def __init__(self, settings: ServiceSettings, text: TextProcessor, pool: TextPool, grammars: GrammarCheck) -> None:
        self.settings = settings
        self._text = text
        self._pool = pool
        self._grammars = grammars

    def check_model(self, name: str) -> None:
        """Raises ModelNotFound unless `name` is served here."""
        if name != self.settings.name:
            raise ModelNotFound(name)

    async def job(self, request: ChatRequest | CompletionRequest) -> Job:
        """What goes to the engine. InvalidRequest, ModelNotFound."""
        self.check_model(request.model)
        adjustments = await self._adjustments(request)
        if isinstance(request, ChatRequest) and request.chosen_tools.mode == "none" and not_null(request.tools) is not None:
            known = map(self._text.control_id, CALL_TOKENS)
            adjustments = forbid(adjustments, [number for number in known if number is not None])
        job = await (self._chat_job(request) if isinstance(request, ChatRequest) else self._completion_job(request))
        return _with(job, adjustments=adjustments)

    async def _adjustments(self, request: Sampling) -> LogitAdjustments | None:
        read = partial(logit_adjustments, request, self.settings.vocab, partial(self._text.encode, add_bos=False))
        return await self._pool.run(read) if request.forbidden_words else read()

    def prompt(self, request: ChatRequest) -> list[int]:
        """The token ids that a chat begins with; takes a while. InvalidRequest, ModelNotFound."""
        self.check_model(request.model)
        return self._render(request, COUNTED_CONTEXTS * self.settings.max_len)[0]

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a raw prompt; takes a while. InvalidRequest: it is much longer than any that fits."""
        self._check_size(len(text), "prompt")
        return self._text.encode(text, add_bos=add_special_tokens, most=COUNTED_CONTEXTS * self.settings.max_len)

    def decode(self, tokens: list[int]) -> str:
        """The text of token ids, control tokens included; takes a while. InvalidRequest: one is none, or they are too many."""
        _at_most("tokens", len(tokens), COUNTED_CONTEXTS * self.settings.max_len, "ids")
        return self._text.decode(self._in_vocab(tokens, "tokens"), skip_special_tokens=False)

    @property
    def thinks(self) -> bool:
        """Whether the model thinks where a request does not say."""
        return self._text.thinks_by_default if self.settings.thinking == "auto" else self.settings.thinking == "on"

    async def _chat_job(self, request: ChatRequest) -> Job:
        wanted = request.max_completion_tokens or request.max_tokens
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        (prompt, tools), form = await self._pool.run(lambda: (self._render(request, self.settings.max_len), request.read_form()))
        limit = wanted or self.settings.max_tokens or self.settings.max_len
        job = self._job(request, [prompt], limit, clip=wanted is None, logprobs=logprobs)
        choice = request.chosen_tools
        job = self._scored(replace(job, is_chat=True, tools=tools, one_call=choice.one), request.prompt_logprobs, 1)
        rules, budget = form.rules if form else None, request.thinking_token_budget
        wants = Constraints(tools, choice, rules, self.settings.tool_grammar, budget)
        thinking = request.template_options.get("enable_thinking", self.thinks)
        kept = await self._grammar(wants, prompt, thinking, form.param if form else "tools")
        return _with(job, grammar=kept, thought=wants.thought_budget(self._text, prompt))

    async def _grammar(self, wants: Constraints, prompt: list[int], thinking: bool, param: str) -> Grammar | None:
        """Of a reply. InvalidRequest: what is asked for cannot be kept; Overloaded: not now. What is only our wish gives way."""
        found = await self._pool.run(lambda: wants.grammar(Markers.of(self._text), prompt, thinking=thinking))
        if found is None:
            return None
        try:
            await self._grammars.check(found.text, param)
        except Overloaded:
            if not wants.ours:
                raise
            return None
        except InvalidRequest:
            if (looser := wants.looser()) is None:
                raise
            return await self._grammar(looser, prompt, thinking, param)
        return found

    async def _completion_job(self, request: CompletionRequest) -> Job:
        sources = request.prompts()
        if any(isinstance(source, str) for source in sources):
            prompts = await self._pool.run(lambda: [self._tokens(source) for source in sources])
        else:
            prompts = [self._tokens(source) for source in sources]
        wanted, form = request.max_tokens, await self._pool.run(request.read_form) if request.demands_form else None
        limit = COMPLETION_TOKENS if wanted is None else max(1, wanted)
        job = self._job(request, prompts, limit, clip=wanted is None, logprobs=request.logprobs)
        scored = [each for each in (request.prompt_logprobs, request.echoed_logprobs) if each is not None]
        job = self._scored(job, max(scored, default=None), len(job.params))
        if request.echo:
            job = await self._pool.run(lambda: replace(job, echoes=self._texts(sources, job), echo_only=wanted == 0))
        if form is None:
            return job
        rules = grammar(None, form.rules, Thought.none)
        await self._grammars.check(rules, form.param)
        return _with(job, grammar=Grammar(rules))

    def _scored(self, job: Job, alternatives: int | None, choices: int) -> Job:
        """`job`, whose first `choices` also give logprobs of their prompts' tokens. InvalidRequest: they are too many."""
        if alternatives is None:
            return job
        _at_most("prompt_logprobs", alternatives, min(self.settings.limits.top_logprobs, MAX_ALTERNATIVES))
        count = sum(len(job.prompt(choice)) for choice in range(choices)) * (1 + alternatives)
        if count > MAX_PROMPT_LOGPROBS:
            message = f"{count} logprobs of prompt tokens, alternatives counted, exceed the limit of {MAX_PROMPT_LOGPROBS}"
            raise InvalidRequest(f"prompt_logprobs: {message} a request", param="prompt_logprobs")
        scored = (msgspec.structs.replace(params, prompt_logprobs=alternatives) for params in job.params[:choices])
        return replace(job, params=(*scored, *job.params[choices:]))

    def _texts(self, sources: Sequence[str | list[int]], job: Job) -> tuple[str, ...]:
        """Of prompts, as an echo shows them: a text as it came."""
        shown = job.skip_special_tokens
        return tuple(each if isinstance(each, str) else self._text.decode(each, skip_special_tokens=shown) for each in sources)

    def _render(self, request: ChatRequest, most: int) -> tuple[list[int], Tools]:
        """The prompt, of `most` tokens, and the tools that the reply may call."""
        messages, declared = [message.plain() for message in request.turns()], request.declared_tools
        self._check_size(characters([messages, declared]), "messages")
        tools, choice = Tools(declared), request.chosen_tools
        _check_choice(choice, tools)
        options = request.template_options
        thinking = options.pop("enable_thinking", self.thinks)
        for name in ("tools", "add_generation_prompt"):  # they are parameters of their own
            if name in options:
                raise InvalidRequest(f"chat_template_kwargs.{name}: not allowed", param="chat_template_kwargs")
        prompt = self._text.render_chat(
            messages,
            tools=declared or None,
            enable_thinking=thinking,
            add_generation_prompt=request.add_generation_prompt is not False,
            most=most,
            **options,
        )
        return prompt, Tools(()) if choice.mode == "none" else tools

    def _tokens(self, source: str | list[int]) -> list[int]:
        if not isinstance(source, str):
            return self._in_vocab(source, "prompt")
        self._check_size(len(source), "prompt")
        return self._text.encode(source, add_bos=True, most=self.settings.max_len)

    def _check_size(self, characters: int, param: str) -> None:
        """What fits has fewer characters a token: more are not even rendered."""
        if characters > self.settings.max_len * CHARACTERS_A_TOKEN:
            raise too_long(f"about {characters} characters", self.settings.max_len, param)

    def _job(self, request: Sampling, prompts: list[list[int]], wanted: int, *, clip: bool, logprobs: int | None) -> Job:
        self._check_limits(request, logprobs)
        self._check_choices(len(prompts), request.n or 1)
        choices = tuple(params for prompt in prompts for params in self._choices(request, prompt, wanted, logprobs))
        shown = request.skip_special_tokens is not False
        packed = tuple(array("i", prompt) for prompt in prompts)
        return Job(packed, choices, clip, stops=request.stops, skip_special_tokens=shown)

    def _choices(self, request: Sampling, prompt: list[int], wanted: int, logprobs: int | None) -> list[SamplingParams]:
        """Of one prompt: with the seeds that it has when it comes alone."""
        if len(prompt) + 1 > self.settings.max_len:
            param = "prompt" if isinstance(request, CompletionRequest) else "messages"
            raise too_long(f"{len(prompt)} tokens", self.settings.max_len, param)
        if not prompt:
            raise InvalidRequest("prompt: must not be empty", param="prompt")
        limit = min(wanted, self.settings.max_len - len(prompt))
        if (request.min_tokens or 0) > limit:
            raise InvalidRequest(f"min_tokens: {request.min_tokens} exceeds the {limit} tokens to generate", param="min_tokens")
        params = self._params(request, limit, logprobs)
        return [msgspec.structs.replace(params, seed=seed) for seed in _seeds(request.seed, request.n or 1)]

    def _check_choices(self, prompts: int, n: int) -> None:
        most = min(MAX_CHOICES, self.settings.capacity)
        if prompts * n > most:
            which = "n" if n > 1 else "prompt"
            raise InvalidRequest(f"{which}: {prompts} prompts of {n} choices each exceed the limit of {most}", param=which)

    def _params(self, request: Sampling, limit: int, logprobs: int | None) -> SamplingParams:
        eos = () if request.ignore_eos else self._text.eos_ids
        own = self._in_vocab(request.stop_ids, "stop_token_ids")
        top_k = _given(request.top_k, self.settings.defaults.top_k)
        return SamplingParams(
            max_tokens=limit,
            temperature=_given(request.temperature, self.settings.defaults.temperature),
            top_k=min(max(top_k, 0), self.settings.vocab),
            top_p=_given(request.top_p, self.settings.defaults.top_p),
            min_p=_given(request.min_p, 0.0),
            min_tokens=request.min_tokens or 0,
            stop_ids=tuple(dict.fromkeys((*eos, *own))),
            logprobs=logprobs,
        )

    def _check_limits(self, request: Sampling, logprobs: int | None) -> None:
        limits = self.settings.limits
        _at_most("n", request.n or 1, limits.n)
        _at_most("stop", len(request.stops), limits.stop_strings, "strings")
        for stop in request.stops:
            _at_most("stop", len(stop.encode("utf-8", "replace")), limits.stop_bytes, "bytes")
        _at_most("stop_token_ids", len(request.stop_ids), limits.stop_token_ids, "ids")
        _at_most("top_logprobs" if isinstance(request, ChatRequest) else "logprobs", logprobs or 0, limits.top_logprobs)
        if "" in request.stops:
            raise InvalidRequest("stop: a stop string must not be empty", param="stop")

    def _in_vocab(self, ids: list[int], param: str) -> list[int]:
        check_ids(ids, self.settings.vocab, param)
        return ids


def _check_choice(choice: ToolChoice, tools: Tools) -> None:
    """A choice of tools is one of those that are declared."""
    for name in choice.names or ():
        if not tools.declares(name):
            raise InvalidRequest(f"tool_choice: {name[:100]!r} is not declared in tools", param="tool_choice")
    if choice.mode == "required" and not tools:
        raise InvalidRequest("tool_choice: 'required' needs tools", param="tool_choice")
    if choice.names == ():
        raise InvalidRequest("tool_choice: allowed_tools names no tool", param="tool_choice")


def too_long(size: str, max_len: int, param: str) -> InvalidRequest:
    """The prompt leaves no room for a token."""
    message = f"This model's context is {max_len} tokens; the prompt has {size}, which leaves no room to generate."
    return InvalidRequest(message, param=param, code="context_length_exceeded")


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value


def _at_most(param: str, value: int, limit: int, what: str = "") -> None:
    if value > limit:
        raise InvalidRequest(f"{param}: {value}{what and ' ' + what} exceeds the limit of {limit}", param=param)


def _seeds(seed: int | None, n: int) -> list[int]:
    """A seed per choice in [0, 2**63): the request's own for the first, mixed for the others; random where none was given."""
    first = secrets.randbits(_SEED_BITS) if seed is None else seed & (2**_SEED_BITS - 1)
    return [first, *((first ^ (_MIX * place)) & (2**_SEED_BITS - 1) for place in range(1, n))]


def _with(job: Job, **changes: Any) -> Job:
    """The same with changed parameters of every choice."""
    return replace(job, params=tuple(msgspec.structs.replace(params, **changes) for params in job.params))
