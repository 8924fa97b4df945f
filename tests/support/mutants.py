"""Faults of one line that a user or an operator would notice, and the tests that should: for `python -m tests.support.mutation`."""

from tests.support.fault import Fault
from tests.support.installed_mutants import INSTALLED

_CORE = (
    Fault(
        "messages-between-plans-unbounded", "engine/core/loop.py",
        "while self._unread and size < _TURN_BYTES:", "while self._unread:", "engine/core/test_loop.py",
    ),
    Fault(
        "core-stops-without-masks", "engine/core/loop.py",
        "for masks in self._masks.discard():", "for masks in ():", "engine/core/test_loop.py",
    ),
    Fault(
        "unreadable-request-ends-the-core", "engine/core/loop.py",
        "if request is None:", "if True:", "engine/core/test_loop.py",
    ),
    Fault(
        "prompt-with-nan-is-cached", "engine/core/results.py",
        "if sequence.cache_points and (row is None or not row.nan):", "if sequence.cache_points:",
        "engine/core/test_not_finite.py",
    ),
    Fault(
        "max-tokens-gives-one-more", "engine/core/results.py",
        "if length + count >= sequence.limit:", "if length + count > sequence.limit:", "engine/core/test_scheduler.py",
    ),
    Fault(
        "cached-tokens-counted-again", "engine/core/results.py",
        "if len(sequence.tokens) == sequence.prompt else 0", "if len(sequence.tokens) >= sequence.prompt else 0",
        "engine/core/test_prefix.py engine/core/test_scheduler.py",
    ),
    Fault(
        "pause-distorts-step-times", "engine/core/step_budget.py",
        "min(milliseconds, MOST_SLOWED * expected.step_ms)", "milliseconds", "engine/core/test_policy.py",
    ),
    Fault(
        "decodes-leave-prompts-no-quarter", "engine/core/step_budget.py",
        "self._rows // 4, 1)", "1)", "engine/core/test_policy.py engine/core/test_scheduler.py",
    ),
    Fault(
        "long-prompt-starves", "engine/core/step_budget.py",
        "(turn and index > 0, prompts[index].tokens)", "(False, prompts[index].tokens)", "engine/core/test_policy.py",
    ),
    Fault(
        "queue-may-be-overtaken-for-ever", "engine/core/admit.py",
        "                if holds_up:", "                if False:", "engine/core/test_policy.py",
    ),
    Fault(
        "admissions-exceed-a-plan", "engine/core/admit.py",
        "if self._size and size > MAX_ADMITTED:", "if False:", "engine/core/test_scheduler.py",
    ),
    Fault(
        "oldest-is-preempted-first", "engine/core/scheduler.py",
        "youngest = self.requests.running[-1]", "youngest = self.requests.running[0]", "engine/core/test_scheduler.py",
    ),
    Fault(
        "drafts-behind-the-limit", "engine/core/scheduler.py",
        "sequence.drafts, sequence.limit - 2 - sequence.high)", "sequence.drafts)", "engine/core/test_widths.py",
    ),
    Fault(
        "rejected-drafts-stay-planned", "engine/core/results.py",
        "sequence.high -= width - given", "sequence.high -= 0", "engine/core/test_widths.py",
    ),
    Fault(
        "row-runs-before-its-mask", "engine/core/scheduler.py",
        "elif high < sequence.limit - 1 and not sequence.waits:", "elif high < sequence.limit - 1:",
        "engine/core/test_world_masks.py engine/core/test_masks.py",
    ),
    Fault(
        "priority-is-ignored", "engine/core/requests.py",
        "(request.priority, self.counters.received)", "(0, self.counters.received)",
        "engine/core/test_policy.py engine/core/test_scheduler.py",
    ),
    Fault(
        "tenants-share-a-cache", "engine/core/requests.py",
        "root_key(request.salt)", 'root_key("")', "engine/core/test_tenants.py engine/core/test_prefix.py",
    ),
    Fault(
        "slots-leak", "engine/core/requests.py",
        "self.free_slots.append(sequence.leave())", "sequence.leave()", "engine/core/test_scheduler.py",
    ),
    Fault(
        "failed-requests-counted-as-finished", "engine/core/requests.py",
        "elif output.finish is FinishReason.error:", "elif False:", "engine/core/test_scheduler.py",
    ),
    Fault(
        "stop-string-counted-as-abort", "engine/core/requests.py",
        "success = reason is AbortReason.stop_string", "success = False", "engine/core/test_scheduler.py engine/core/test_loop.py",
    ),
    Fault(
        "nan-stays-in-freed-pages", "engine/core/allocator.py",
        "certain = 0 if poisoned else", "certain =", "engine/core/test_not_finite.py",
    ),
    Fault(
        "window-released-a-page-early", "engine/core/allocator.py",
        "run.drop_before(first_page(pool.group, sequence.low))", "run.drop_before(first_page(pool.group, sequence.low) + 1)",
        "engine/core/test_scheduler.py",
    ),
    Fault(
        "any-pages-may-be-a-prefix", "engine/core/prefix.py",
        "key = sha256(key + content", "key = sha256(content", "engine/core/test_prefix.py",
    ),
    Fault(
        "cache-exceeds-its-share", "engine/core/prefix.py",
        "pool.idle > self._share * pool.total", "pool.idle > pool.total", "engine/core/test_prefix.py",
    ),
    Fault(
        "cache-evicts-what-is-used", "engine/core/prefix.py",
        "self._order.move_to_end(ancestor)", "pass", "engine/core/test_prefix.py",
    ),
    Fault(
        "thought-exceeds-its-budget", "engine/core/masks.py",
        "self._label + self._left", "self._label + self._left + 1", "engine/core/test_thought_limit.py",
    ),
    Fault(
        "grammar-holds-behind-its-call", "engine/core/masks.py",
        "if state.matcher.frees and state.matcher.complete:", "if False:", "engine/core/test_masks.py",
    ),
)

_RANK = (
    Fault(
        "failed-sum-is-served", "engine/rank/stages/report_stage.py",
        "if (flags & ROW_ERROR).any():", "if False:", "engine/rank/test_runner.py",
    ),
    Fault(
        "hash-forgets-the-tokens", "engine/rank/stages/report_stage.py",
        'for name in ("chosen", "hidden"):', 'for name in ("hidden",):', "engine/rank/test_runner.py",
    ),
    Fault(
        "last-tenants-adjustments-stay", "engine/rank/adjustments.py",
        " or self._flags[admission.slot]]", "]", "engine/rank/test_adjustments.py",
    ),
    Fault(
        "counts-run-into-in-the-prompt", "engine/rank/adjustments.py",
        "np.minimum(np.bincount(generated, minlength=len(self.ids)), MOST_COUNTED)",
        "np.bincount(generated, minlength=len(self.ids))", "engine/rank/test_adjustments.py",
    ),
    Fault(
        "fp8-loads-without-scales", "engine/weight_formats.py",
        '= ("BF16", "F16", "F32")', '= ("BF16", "F16", "F32", "F8_E4M3")', "engine/rank/test_odd_checkpoints.py",
    ),
    Fault(
        "scales-of-columns-are-cut", "engine/rank/load/slices.py",
        "if unit == 0:", "if unit == 0 and cut.start == 0:", "engine/rank/test_weight_formats.py",
    ),
    Fault(
        "fp32-pages-count-as-bf16", "engine/geometry.py",
        "* ITEMSIZE[self.dtype]", "* 2", "deploy/test_settings.py",
    ),
    Fault(
        "up-rows-overwrite-gate-rows", "engine/rank/load/slices.py",
        'share if part == "up" else 0', "0", "engine/rank/test_weights.py",
    ),
    Fault(
        "last-tenants-pages-stay", "kernels/admissions.py",
        "table[slot] = 0", "pass", "engine/rank/test_slots.py",
    ),
    Fault(
        "last-tenants-prompt-logprobs-stay", "engine/rank/slots.py",
        "self.prompt_scorings.pop(slot, None)", "pass", "engine/rank/test_slots.py",
    ),
    Fault(
        "min-tokens-counts-the-prompt", "engine/rank/slots.py",
        "admission.prompt + params.min_tokens", "params.min_tokens",
        "engine/rank/test_slots.py",
    ),
    Fault(
        "rank-of-a-logprob-is-off-by-one", "engine/rank/sampler.py",
        "(capped >= chosen)", "(capped > chosen)", "engine/rank/test_sampler.py",
    ),
    Fault(
        "logprobs-are-not-normalised", "engine/rank/sampler.py",
        "(values - total).view(torch.int32)", "values.view(torch.int32)", "engine/rank/test_sampler.py",
    ),
    Fault(
        "steps-in-flight-are-dropped-at-stop", "engine/rank/worker.py",
        "while running or self._launched:", "while running:", "engine/rank/test_overlap.py",
    ),
    Fault(
        "step-time-is-lost", "engine/rank/worker.py",
        "with_time(result, busy_us)", "result", "engine/rank/test_worker.py",
    ),
    Fault(
        "times-keep-what-prompts-added", "engine/core/drafting.py",
        "if self._prompts.token_ms and not known:", "if False:", "engine/core/test_drafting.py",
    ),
    Fault(
        "broken-model-starts", "engine/rank/start_checks.py",
        "if not rms >= MIN", "if rms < MIN", "engine/rank/test_weights.py",
    ),
    Fault(
        "ranks-disagree-on-a-fault", "engine/rank/start_checks.py",
        "parallel.all_reduce(flags).tolist()", "flags.tolist()", "engine/rank/test_start_checks.py",
    ),
)

_FRONT = (
    Fault(
        "tail-of-a-finished-answer-is-lost", "engine/front/client.py",
        "> MAX_PILED_TOKENS and output.finish is None:", "> MAX_PILED_TOKENS:", "engine/front/test_client.py",
    ),
    Fault(
        "tpot-counts-the-first-token", "engine/front/client.py",
        "(last - first) / (count - 1)", "(last - first) / count", "engine/front/test_reports.py engine/front/test_client.py",
    ),
    Fault(
        "verdicts-are-kept-for-ever", "engine/front/grammar_check.py",
        "if len(self._verdicts) > _REMEMBERED:", "if False:", "engine/front/test_grammar_check.py",
    ),
    Fault(
        "refused-grammar-is-let-in", "engine/front/grammar_check.py",
        "if (wrong := self._verdicts[key]) is not None:", "if (wrong := self._verdicts[key]) == 0:",
        "engine/front/test_grammar_check.py",
    ),
    Fault(
        "end-token-is-shown", "engine/front/generation.py",
        "output.tokens[:-1] if _last(output)", "output.tokens if _last(output)", "deploy/edge/test_api.py",
    ),
    Fault(
        "shorter-stop-string-wins", "engine/front/text.py",
        "= min(matches)", "= min(matches, key=lambda match: (match[0], -match[1]))", "engine/front/test_stop_strings.py",
    ),
    Fault(
        "half-a-character-is-shown", "engine/front/text.py",
        "out.append(self._decode(final=False))", "out.append(self._decode(final=True))", "engine/front/test_text.py",
    ),
    Fault(
        "prompt-begins-with-two-bos", "engine/front/text.py",
        " or ids[:1] == [self._bos_id]:", ":", "engine/front/test_text.py",
    ),
    Fault(
        "messages-may-hold-control-tokens", "engine/front/template.py",
        "value = value.replace(opener, opener + sentinel)", "pass", "engine/front/test_text.py engine/front/test_history.py",
    ),
    Fault(
        "old-thoughts-are-sent-again", "engine/front/template.py",
        'return "".join(part.split("<|channel>")[0] for part in text.split("<channel|>"))', "return text",
        "engine/front/test_history.py engine/front/test_text.py",
    ),
    Fault(
        "answer-shows-a-thoughts-newline", "engine/front/reply.py",
        'self._held = "\\n" if text.endswith("\\n") else ""', 'self._held = ""', "engine/front/test_reply.py",
    ),
    Fault(
        "cut-call-is-completed", "engine/front/reply.py",
        "self._end_open_call(complete=not cut)", "self._end_open_call(complete=True)", "engine/front/test_reply.py",
    ),
    Fault(
        "optional-argument-is-demanded", "engine/front/call_grammar.py",
        "depth), key in required)", "depth), True)", "engine/front/test_grammar.py engine/front/test_schema_features.py",
    ),
    Fault(
        "call-without-parameters-has-arguments", "engine/front/call_grammar.py",
        '"properties" not in schema)', "True)", "engine/front/test_schema_features.py",
    ),
    Fault(
        "same-tool-twice-is-let-in", "engine/front/tools.py",
        "if name in self._schemas:", "if False:", "engine/front/test_tools.py",
    ),
    Fault(
        "required-call-may-be-several", "engine/front/constraints.py",
        "1 if self.choice.one else None", "None", "engine/front/test_grammar.py deploy/edge/test_reply_forms.py",
    ),
)

_EDGE = (
    Fault(
        "cached-tokens-of-choices-are-the-most", "deploy/edge/answer.py",
        "sum(min(cached[", "sum(max(cached[", "deploy/edge/test_api.py",
    ),
    Fault(
        "slow-client-is-waited-for", "deploy/edge/answer.py",
        'await bounded(send({"type": "http.response.body", "body": body, "more_body": more}), timeout_s)',
        'await send({"type": "http.response.body", "body": body, "more_body": more})', "deploy/edge/test_streams.py",
    ),
    Fault(
        "choices-share-noise", "deploy/edge/job_builder.py",
        "[(first ^ (_MIX * choice))", "[(first + choice)", "deploy/edge/test_api.py",
    ),
    Fault(
        "greedy-checkpoint-samples", "deploy/edge/service_settings.py",
        'if config.get("do_sample") is False:', "if False:", "deploy/edge/test_validation.py deploy/edge/test_api.py",
    ),
    Fault(
        "anybody-may-jump-the-queue", "deploy/edge/service.py",
        "if ask.priority < most:", "if False:", "deploy/edge/test_sharing.py deploy/edge/test_validation.py",
    ),
    Fault(
        "holders-of-keys-share-a-cache", "deploy/edge/service.py",
        'hexdigest() if isolated else ""', 'hexdigest() if False else ""', "deploy/edge/test_sharing.py deploy/edge/test_keys.py",
    ),
    Fault(
        "ignore-eos-is-ignored", "deploy/edge/job_builder.py",
        "() if sampling.ignore_eos else self.text.eos_ids", "self.text.eos_ids", "deploy/edge/test_api.py",
    ),
    Fault(
        "waiting-tokens-unbounded", "deploy/edge/admission_control.py",
        "if waiting and waiting + tokens > self.tokens:", "if False:", "deploy/edge/test_admission.py",
    ),
    Fault(
        "places-leak", "deploy/edge/admission_control.py",
        "self._open_answers -= answers", "pass", "deploy/edge/test_admission.py",
    ),
    Fault(
        "modest-client-gives-way", "deploy/edge/admission_control.py",
        "if held[greediest] <= held[client] + choices:", "if False:", "deploy/edge/test_admission.py",
    ),
    Fault(
        "body-may-be-any-size", "deploy/edge/limits.py",
        "if upload.held > self._limits.body_bytes:", "if False:", "deploy/edge/test_limits.py",
    ),
    Fault(
        "any-host-is-ours", "deploy/edge/limits.py",
        "if limits.hosts is not None and name not in map(str.lower, limits.hosts):", "if False:", "deploy/edge/test_browsers.py",
    ),
    Fault(
        "clients-steer-the-deadline", "deploy/edge/limits.py",
        "if name.lower() not in STRIPPED_HEADERS", "if True", "deploy/edge/test_limits.py",
    ),
    Fault(
        "expired-key-passes", "deploy/edge/keys/key_ring.py",
        "if match is None or match.has_expired(now)", "if match is None", "deploy/edge/test_keys.py deploy/edge/test_key_file.py",
    ),
    Fault(
        "any-key-has-all-rights", "deploy/edge/key_gate.py",
        'elif endpoint.right not in {"open", *key.rights}:', "elif False:", "deploy/edge/test_keys.py",
    ),
    Fault(
        "quota-fills-by-the-second", "deploy/edge/keys/quotas.py",
        "MINUTE = 60.0", "MINUTE = 1.0", "deploy/edge/test_quotas.py",
    ),
    Fault(
        "overload-does-not-say-when", "deploy/edge/error_response.py",
        'headers["retry-after"] = str(error.retry_after_s)', "pass", "deploy/edge/test_admission.py deploy/edge/test_api.py",
    ),
    Fault(
        "minus-infinity-in-json", "deploy/edge/openai/forms.py",
        "return logprob if math.isfinite(logprob) else _FLOOR", "return logprob",
        "deploy/edge/test_whole_answers.py deploy/edge/test_api.py deploy/edge/test_prompt_logprobs.py",
    ),
    Fault(
        "first-delta-is-shown-twice", "deploy/edge/openai/response_stream.py",
        'self._part_event("added", block, "")', 'self._part_event("added", block, block.text)', "deploy/edge/test_responses.py",
    ),
    Fault(
        "unfinished-stream-says-done", "deploy/edge/openai/data_events.py",
        "return data_event(OPENAI_ERROR.body(error))", "return data_event(OPENAI_ERROR.body(error)) + DONE",
        "deploy/edge/test_streams.py deploy/edge/test_api.py",
    ),
    Fault(
        "messages-count-cached-tokens-twice", "deploy/edge/anthropic/message_format.py",
        '"input_tokens": usage.prompt - usage.cached', '"input_tokens": usage.prompt', "deploy/edge/test_messages.py",
    ),
)

_KERNELS = (
    Fault(
        "top-p-draws-from-too-few", "kernels/filters.py",
        "1.00001", "0.9", "kernels/test_filters.py",
    ),
    Fault(
        "negative-zero-is-never-seen", "kernels/choose.py",
        "tl.where(sent == _EMPTY, 0, sent)", "sent", "kernels/test_choose.py",
    ),
    Fault(
        "nan-row-gives-a-token", "kernels/choose.py",
        "bad = nan.any(-1)", "bad = nan.any(-1) & False", "engine/rank/test_sampler.py",
    ),
    Fault(
        "needed-null-page-is-missed", "kernels/table_check.py",
        "bad = needed & ((value != correct) | (correct == 0))", "bad = needed & (value != correct)", "kernels/test_table_check.py",
    ),
    Fault(
        "device-count-runs-into-in-the-prompt", "kernels/adjust.py",
        "(tl.minimum((bits & _MOST) + 1, _MOST) | (bits & _PROMPT))", "(((bits & _MOST) + 1) | (bits & _PROMPT))",
        "engine/rank/test_adjustments.py",
    ),
    Fault(
        "repetition-raises-bad-logits", "kernels/adjust.py",
        "torch.where(x > 0, x / repetition, x * repetition)", "x / repetition", "engine/rank/test_adjustments.py",
    ),
    Fault(
        "frequency-penalty-rewards", "kernels/adjust.py",
        "x = x - frequency * times", "x = x + frequency * times", "engine/rank/test_adjustments.py",
    ),
    Fault(
        "candidates-ignore-top-p", "kernels/candidates.py",
        "searching = tl.where((top_p >= 1.0) |", "searching = tl.where((top_p >= 0.0) |", "kernels/test_candidates.py",
    ),
    Fault(
        "top-k-keeps-one-more", "kernels/sample.py",
        "torch.arange(width, device=scaled.device) < torch.where", "torch.arange(width, device=scaled.device) <= torch.where",
        "kernels/test_sample.py",
    ),
    Fault(
        "window-shows-one-key-more", "kernels/paged_attention.py",
        "keys > positions[..., None] - window", "keys >= positions[..., None] - window", "kernels/test_decode.py",
    ),
    Fault(
        "kernel-window-shows-one-key-more", "kernels/splitkv.py",
        "oldest = tl.maximum(position - WINDOW + 1, 0)", "oldest = tl.maximum(position - WINDOW, 0)", "kernels/test_decode.py",
    ),
    Fault(
        "padding-rows-write-into-pages", "kernels/qkv.py",
        "if not live.all():", "if False:", "kernels/test_qkv.py",
    ),
    Fault(
        "expert-weights-are-not-normalised", "kernels/route.py",
        "weights / weights.sum(-1, keepdim=True) *", "weights *", "kernels/test_experts.py engine/rank/test_layers.py",
    ),
    Fault(
        "kernel-experts-tokens-are-swapped", "kernels/experts.py",
        "tl.load(order + row, row < end, 0) // TOP", "tl.load(order + row, row < end, 0) % TOP", "kernels/test_experts.py",
    ),
    Fault(
        "residual-before-the-norm", "kernels/norm.py",
        "total = residual + rms_norm(x, weight, eps)", "total = rms_norm(residual + x, weight, eps)", "kernels/test_norm.py",
    ),
)

_LEAVES = (
    Fault(
        "suspended-machine-kills-its-group", "cluster/health.py",
        "if now - self._looked_ns > (PERIOD_S +", "if 0 > (PERIOD_S +", "cluster/test_health.py",
    ),
    Fault(
        "ranks-that-differ-go-on", "cluster/health.py",
        "if len(holders) > 1:", "if False:", "cluster/test_health.py",
    ),
    Fault(
        "error-hides-the-signal", "cluster/children.py",
        "return self.code is not None and self.code < 0", "return False", "cluster/test_children.py cluster/test_health.py",
    ),
    Fault(
        "visible-devices-in-any-order", "cluster/capability.py",
        "if len(matches) != 1 or matches[0] in shown:", "if len(matches) != 1:", "cluster/test_capability.py",
    ),
    Fault(
        "padding-slots-tables-not-counted", "engine/memory.py",
        "return (max_seqs + 1) * (counts", "return max_seqs * (counts", "engine/test_memory.py",
    ),
    Fault(
        "largest-plan-a-page-short", "engine/plan.py",
        "seqs * -(-width // page))", "seqs * (width // page))", "engine/core/test_scheduler.py",
    ),
    Fault(
        "default-rope-is-partial", "engine/geometry.py",
        'if kind == "proportional" else 1.0', "", "engine/test_geometry.py engine/test_config_keys.py",
    ),
    Fault(
        "last-layer-as-listed", "engine/geometry.py",
        '[table[name] for name in names[:-1]] + ["full"]', "[table[name] for name in names]",
        "engine/test_geometry.py engine/test_config_keys.py",
    ),
    Fault(
        "torn-record-is-read", "engine/channel.py",
        "whole = len(payload) == size and checksum(payload, step & 0xFFFFFFFF) == expected", "whole = len(payload) == size",
        "engine/test_channel.py",
    ),
    Fault(
        "part-of-a-record-is-read", "engine/channel.py",
        "whole = len(payload) == size and checksum(", "whole = checksum(", "engine/test_channel.py",
    ),
    Fault(
        "media-wait-for-a-step", "engine/rank/worker.py",
        " and not self._media.left", "", "engine/rank/test_overlap.py",
    ),
    Fault(
        "media-are-not-waited-for", "engine/rank/stages/encode_stage.py",
        "            self._media.finish()", "            pass", "engine/rank/test_encode_stage.py",
    ),
    Fault(
        "steps-wait-for-media", "engine/rank/stages/encode_stage.py",
        "            return self._media.advance()", "            return self._media.finish() is None",
        "engine/rank/test_encode_stage.py",
    ),
    Fault(
        "frames-run-into-each-other", "engine/protocol.py",
        "if len(self._buffer) < end:", "if False:", "engine/front/test_client.py engine/core/test_loop.py",
    ),
)

FAULTS = (*_CORE, *_RANK, *_FRONT, *_EDGE, *_KERNELS, *_LEAVES, *INSTALLED)
