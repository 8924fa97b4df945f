"""Converts an Ask to the engine's job, within the limits."""

import secrets
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from deploy.edge.adapters.adapter_registry import AdapterRegistry
from deploy.edge.bodies.raw_json import invalid
from deploy.edge.jobs.logit_keys import check_ids, logit_adjustments
from deploy.edge.media.media_preparer import MediaPreparer, media_items
from deploy.edge.media.tasks import Prepared
from deploy.edge.processes.text_pool import TextPool
from deploy.edge.requests.ask import AnswerForm, Ask, ChatPrompt, RawPrompts
from deploy.edge.service_settings import ServiceSettings
from engine.errors import InvalidRequest, Overloaded
from engine.front.constraints import Constraints, ToolChoice
from engine.front.generation import Job
from engine.front.grammar import Thought, grammar
from engine.front.grammar_check import GrammarCheck
from engine.front.reply import Markers
from engine.front.template import characters
from engine.front.text import TextProcessor
from engine.front.tools import NO_TOOLS, Tools
from engine.protocol import Grammar, SamplingParams

CALL_TOKENS = ("<|tool_call>", "<|tool_response>")  # not to come with tool_choice none, where tools stay declared in the prompt
MAX_PROMPT_LOGPROBS = 1 << 18  # of a request, alternatives counted: some 70 bytes of JSON each
MAX_CHOICES = 64  # of a request, all its prompts together
CHARACTERS_A_TOKEN = 16  # on an average over a prompt, at most
COUNTED_CONTEXTS = 2  # contexts: a longer prompt is not even counted
COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions
GrammarMaker = Callable[[Constraints], Grammar | None]
_SEED_BITS = 63
_MIX = 0x9E3779B97F4A7C15  # apart: neighbouring choices must not share noise


@dataclass
class JobBuilder:
    """`pool` runs slow work."""

    settings: ServiceSettings
    text: TextProcessor
    pool: TextPool
    grammars: GrammarCheck
    media_preparer: MediaPreparer
    adapters: AdapterRegistry

    def __post_init__(self) -> None:
        self._markers = Markers.of(self.text)

    def check_model(self, name: str | None) -> int:
        """ModelNotFound, as `AdapterRegistry.id_of`."""
        return self.adapters.id_of(name)

    async def job(self, ask: Ask, client: str) -> Job:
        """Media and grammars take the client's turn. InvalidRequest, ModelNotFound, Overloaded."""
        adapter = self.check_model(ask.model)
        if isinstance(ask.prompt, ChatPrompt):
            job = await self._chat_job(ask, ask.prompt, client)
        else:
            job = await self._raw_job(ask, ask.prompt, client)
        return replace(job, adapter=adapter, client=client, priority=ask.priority)

    async def prompt(self, chat: ChatPrompt, client: str) -> list[int]:
        """InvalidRequest, Overloaded."""
        media = await self.media_preparer.prepare(chat, "messages", self.settings, client)
        return await self.pool.run(lambda: self._render(chat, media, "messages", COUNTED_CONTEXTS * self.settings.max_len)[0])

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Slow. InvalidRequest if far too long."""
        self._check_size(len(text), "prompt")
        return self.text.encode(text, add_bos=add_special_tokens, most=COUNTED_CONTEXTS * self.settings.max_len)

    def decode(self, tokens: list[int]) -> str:
        """With control tokens. Slow. InvalidRequest: a bad id, or too many."""
        if len(tokens) > (most := COUNTED_CONTEXTS * self.settings.max_len):
            raise invalid("tokens", f"{len(tokens)} ids exceeds the limit of {most}")
        return self.text.decode(check_ids(tokens, self.settings.vocab, "tokens"), skip_special_tokens=False)

    async def _chat_job(self, ask: Ask, chat: ChatPrompt, client: str) -> Job:
        media = await self.media_preparer.prepare(chat, ask.prompt_key, self.settings, client)
        job, form = await self.pool.run(lambda: self._rendered(ask, chat, media))
        wants = Constraints(job.tools, chat.choice, form.rules if form else None, self.settings.tool_grammar, chat.thought_tokens)
        prompt = job.prompt(0)
        make = partial(Constraints.grammar, markers=self._markers, prompt=prompt, thinking=self._thinks(chat))
        kept = await self._grammar(wants, make, form.key if form else "tools", client)
        return _with(job, grammar=kept, thought=wants.thought_budget(self.text, self._markers, prompt))

    def _rendered(self, ask: Ask, chat: ChatPrompt, media: Sequence[Prepared]) -> tuple[Job, AnswerForm | None]:
        settings = self.settings
        prompt, tools = self._render(chat, media, ask.prompt_key, settings.max_len)
        if chat.choice.mode == "required":
            _check_end(ask, "a tool_choice that requires a call")
        banned = map(self.text.control_id, CALL_TOKENS) if chat.choice.mode == "none" and chat.tools else ()
        limit = ask.sampling.max_tokens or settings.max_tokens or settings.max_len
        job = self._job(ask, [prompt], limit, scored=1, banned=[token for token in banned if token is not None])
        if media:
            items = media_items(prompt, media, self.text)
        else:
            items = ()
        return replace(job, markers=self._markers, tools=tools, one_call=chat.choice.one, media=items), _form(ask)

    def _thinks(self, chat: ChatPrompt) -> bool:
        if chat.thinks is not None:
            return chat.thinks
        if self.settings.thinking == "auto":
            return self.text.thinks_by_default
        return self.settings.thinking == "on"

    async def _grammar(self, wants: Constraints, make: GrammarMaker, param: str, client: str) -> Grammar | None:
        """Rules that only the server wants are dropped first. InvalidRequest, Overloaded."""
        reply_grammar = await self.pool.run(lambda: make(wants))
        if reply_grammar is None:
            return None
        try:
            await self.grammars.check(reply_grammar.text, param, client)
        except Overloaded:
            if not wants.unrequested:
                raise
            return None
        except InvalidRequest:
            if (looser := wants.looser()) is None:
                raise
            return await self._grammar(looser, make, param, client)
        return reply_grammar

    async def _raw_job(self, ask: Ask, raw: RawPrompts, client: str) -> Job:
        job, form = await self.pool.run(lambda: self._tokenized(ask, raw))
        if form is None:
            return job
        rules = grammar(None, form.rules, Thought.none)
        await self.grammars.check(rules, form.key, client)
        return _with(job, grammar=Grammar(rules))

    def _tokenized(self, ask: Ask, raw: RawPrompts) -> tuple[Job, AnswerForm | None]:
        sampling = ask.sampling
        if sampling.max_tokens is None:
            limit = COMPLETION_TOKENS
        else:
            limit = max(1, sampling.max_tokens)
        job = self._job(ask, [self._tokens(source, ask.prompt_key) for source in raw.sources], limit, scored=sampling.n)
        if raw.echo:
            decode = partial(self.text.decode, skip_special_tokens=sampling.skip_special_tokens)
            texts = tuple(source if isinstance(source, str) else decode(source) for source in raw.sources)
            job = replace(job, echoes=texts, echo_only=sampling.max_tokens == 0)
        return job, _form(ask)

    def _render(self, chat: ChatPrompt, media: Sequence[Prepared], key: str, most: int) -> tuple[list[int], Tools]:
        """The prompt, at most `most` tokens, and the callable tools. Errors name `key`."""
        messages = [message.plain() for message in chat.messages]
        tools = Tools(chat.tools, chat.tool_paths)
        _check_choice(chat.choice, tools)
        try:
            self._check_size(characters([messages, chat.tools]), key)
            prompt = self.text.render_chat(
                messages,
                tools=chat.tools,
                enable_thinking=self._thinks(chat),
                add_generation_prompt=chat.add_generation_prompt,
                most=most,
                media=[(medium.kind, medium.text) for medium in media],
                **chat.switches,
            )
        except InvalidRequest as error:  # of "messages"
            raise InvalidRequest(str(error).replace("messages", key, 1), key, error.code) from error
        return prompt, NO_TOOLS if chat.choice.mode == "none" else tools

    def _tokens(self, source: str | list[int], key: str) -> list[int]:
        if not isinstance(source, str):
            return check_ids(source, self.settings.vocab, key)
        self._check_size(len(source), key)
        return self.text.encode(source, add_bos=True, most=self.settings.max_len)

    def _check_size(self, characters: int, param: str) -> None:
        if characters > self.settings.max_len * CHARACTERS_A_TOKEN:
            raise too_long(f"at least {characters // CHARACTERS_A_TOKEN} tokens", self.settings.max_len, param)

    def _job(self, ask: Ask, prompts: list[list[int]], limit: int, *, scored: int, banned: Sequence[int] = ()) -> Job:
        """`scored` choices of each prompt give its logprobs if asked; `banned` ids may not come."""
        self._check_limits(ask, len(prompts))
        sampling = ask.sampling
        params = self._params(ask, limit, banned)
        choices = tuple(choice for prompt in prompts for choice in self._choices(ask, prompt, params, scored))
        if ask.prompt_logprobs is not None:
            count = scored * sum(map(len, prompts)) * (1 + ask.prompt_logprobs)
            if count > MAX_PROMPT_LOGPROBS:
                why = f"{count} logprobs of prompt tokens, alternatives counted, exceed the limit of {MAX_PROMPT_LOGPROBS}"
                raise invalid("prompt_logprobs", f"{why} a request")
        return Job(
            tuple(array("i", prompt) for prompt in prompts),
            choices,
            clip=sampling.max_tokens is None,
            stops=sampling.stops,
            skip_special_tokens=sampling.skip_special_tokens,
        )

    def _choices(self, ask: Ask, prompt: list[int], params: SamplingParams, scored: int) -> list[SamplingParams]:
        """With the seeds that one prompt would have alone."""
        context = self.settings.max_len
        if len(prompt) + 1 > context:
            raise too_long(f"{len(prompt)} tokens", context, ask.prompt_key)
        if not prompt:
            raise invalid(ask.prompt_key, "must not be empty")
        limit = min(params.max_tokens, context - len(prompt))
        if (least := ask.sampling.min_tokens) > limit:
            raise invalid("min_tokens", f"{least} exceeds the {limit} tokens to generate")
        return [
            msgspec.structs.replace(
                params, max_tokens=limit, seed=seed, prompt_logprobs=ask.prompt_logprobs if choice < scored else None
            )
            for choice, seed in enumerate(_seeds(ask.sampling.seed, ask.sampling.n))
        ]

    def _params(self, ask: Ask, limit: int, banned: Sequence[int]) -> SamplingParams:
        sampling = ask.sampling
        defaults = self.settings.defaults
        eos = () if sampling.ignore_eos else self.text.eos_ids
        return SamplingParams(
            max_tokens=limit,
            temperature=_given(sampling.temperature, defaults.temperature),
            top_k=min(max(_given(sampling.top_k, defaults.top_k), 0), self.settings.vocab),
            top_p=max(_given(sampling.top_p, defaults.top_p), 1e-6),  # 0: the likeliest token
            min_p=sampling.min_p,
            min_tokens=sampling.min_tokens,
            stop_ids=tuple(dict.fromkeys((*eos, *check_ids(sampling.stop_ids, self.settings.vocab, "stop_token_ids")))),
            logprobs=ask.logprobs,
            drafts=sampling.speculative,
            adjustments=logit_adjustments(sampling, self.settings.vocab, partial(self.text.encode, add_bos=False), banned),
        )

    def _check_limits(self, ask: Ask, prompts: int) -> None:
        sampling = ask.sampling
        limits = self.settings.limits
        if ask.priority < (most := limits.min_priority):
            raise invalid("priority", f"{ask.priority} is more urgent than {most}, the most urgent allowed here")
        if sampling.n > (most := limits.n):
            raise invalid("n", f"{sampling.n} exceeds the limit of {most}")
        most = min(MAX_CHOICES, self.settings.capacity)
        key = "n" if sampling.n > 1 else ask.prompt_key
        if prompts * sampling.n > most:
            raise invalid(key, f"{prompts} prompts of {sampling.n} choices each exceed the limit of {most}")


def _form(ask: Ask) -> AnswerForm | None:
    form = ask.form() if ask.form else None
    if form is not None:
        _check_end(ask, f"{form.key}, whose answers end where they are complete")
    return form


def _check_end(ask: Ask, what: str) -> None:
    for key, given in (("ignore_eos", ask.sampling.ignore_eos), ("min_tokens", ask.sampling.min_tokens)):
        if given:
            raise invalid(key, f"not with {what}")


def _check_choice(choice: ToolChoice, tools: Tools) -> None:
    for name in choice.names or ():
        if not tools.declares(name):
            raise invalid("tool_choice", f"{name[:100]!r} is not declared in tools")
    if choice.mode == "required" and not tools:
        raise invalid("tool_choice", "a choice that requires a call needs tools")
    if choice.names == ():
        raise invalid("tool_choice", "allowed_tools names no tool")


def too_long(size: str, max_len: int, param: str) -> InvalidRequest:
    most = f"This model's maximum context length is {max_len} tokens, of which one is to be generated."
    message = f"prompt is too long: {size} > {max_len - 1} maximum. {most}"  # agents compact a chat that is answered in these words
    return InvalidRequest(message, param=param, code="context_length_exceeded")


def _given(value: Any, default: Any) -> Any:
    if value is None:
        return default
    return value


def _seeds(seed: int | None, n: int) -> list[int]:
    """Seeds in [0, 2**63): the given one first, then mixed ones; random without a seed."""
    if seed is None:
        first = secrets.randbits(_SEED_BITS)
    else:
        first = seed
    return [(first ^ (_MIX * choice)) & (2**_SEED_BITS - 1) for choice in range(n)]


def _with(job: Job, **changes: Any) -> Job:
    return replace(job, params=tuple(msgspec.structs.replace(params, **changes) for params in job.params))
