"""Faults of one line that a user or an operator would notice, and the tests that should: for `python -m tests.support.mutation`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """`old` occurs once in `file`, or stands at byte `begin`, and becomes `new`. `id` says what goes wrong then.

    tests  files below tests/, nearest first
    """

    id: str
    file: str
    old: str
    new: str
    tests: str
    begin: int | None = None


# file -> (what goes wrong, files below tests/, nearest first, what stands there once, what it becomes)
_BY_FILE: dict[str, tuple[tuple[str, str, str, str], ...]] = {
    "engine/core/loop.py": (
        ("messages-between-plans-unbounded", "engine/core/test_loop.py",
         "while self._unread and size < _TURN_BYTES:", "while self._unread:"),
        ("core-stops-without-masks", "engine/core/test_loop.py", "for masks in self._masks.discard():", "for masks in ():"),
        ("unreadable-request-ends-the-core", "engine/core/test_loop.py",
         "request = msgspec.msgpack.decode(raw, type=_Identified)", "raise"),
    ),
    "engine/core/results.py": (
        ("prompt-with-nan-is-cached", "engine/core/test_prefix.py",
         "if row is None or not row.nan:", "if True:"),
        ("max-tokens-gives-one-more", "engine/core/test_scheduler.py",
         "if length + count >= sequence.limit:", "if length + count > sequence.limit:"),
        ("cached-tokens-counted-again", "engine/core/test_prefix.py engine/core/test_scheduler.py",
         "if len(sequence.tokens) == sequence.prompt:", "if len(sequence.tokens) >= sequence.prompt:"),
        ("rejected-drafts-stay-planned", "engine/core/test_scheduler.py",
         "sequence.planned -= width - given", "sequence.planned -= 0"),
    ),
    "engine/core/step_budget.py": (
        ("pause-distorts-step-times", "engine/core/test_policy.py",
         "min(milliseconds, MOST_SLOWED * expected_ms)", "milliseconds"),
        ("decodes-leave-prompts-no-quarter", "engine/core/test_policy.py engine/core/test_scheduler.py",
         "rows // 4, 1)", "1)"),
        ("long-prompt-starves", "engine/core/test_policy.py",
         "(turn and index > 0, self", "(False, self"),
        ("lateness-has-no-floor", "engine/core/test_policy.py",
         "max(-self._target_ms, self._late_ms + milliseconds - self._target_ms)", "self._late_ms + milliseconds - self._target_ms"),
    ),
    "engine/core/admit.py": (
        ("queue-may-be-overtaken-for-ever", "engine/core/test_policy.py",
         "                if holds_up:", "                if False:"),
        ("admissions-exceed-a-plan", "engine/core/test_scheduler.py", "if self._size and size > MAX_ADMITTED:", "if False:"),
    ),
    "engine/core/scheduler.py": (
        ("oldest-is-preempted-first", "engine/core/test_scheduler.py",
         "youngest = self.requests.running[-1]", "youngest = self.requests.running[0]"),
        ("drafts-behind-the-limit", "engine/core/test_scheduler.py",
         "sequence.drafts.planned, sequence.limit - 2 - sequence.planned)", "sequence.drafts.planned)"),
        ("row-runs-before-its-mask", "engine/core/test_scheduler.py engine/core/test_masks.py",
         "elif planned < sequence.limit - 1 and not sequence.waits:", "elif planned < sequence.limit - 1:"),
        ("lateness-is-never-forgotten", "engine/core/test_media.py",
         "self._budget.forget_lateness()", "pass"),
    ),
    "engine/core/requests.py": (
        ("priority-is-ignored", "engine/core/test_policy.py engine/core/test_scheduler.py",
         "(request.priority, self.counters.received)", "(0, self.counters.received)"),
        ("tenants-share-a-cache", "engine/core/test_tenants.py engine/core/test_prefix.py",
         "root_key(request.salt, request.adapter)", "root_key('', request.adapter)"),
        ("slots-leak", "engine/core/test_scheduler.py", "self.free_slots.append(sequence.leave())", "sequence.leave()"),
        ("failed-requests-counted-as-finished", "engine/core/test_scheduler.py",
         "elif output.finish is FinishReason.error:", "elif False:"),
        ("stop-string-counted-as-abort", "engine/core/test_scheduler.py engine/core/test_loop.py",
         "success = reason is AbortReason.stop_string", "success = False"),
    ),
    "engine/core/allocator.py": (
        ("nan-stays-in-freed-pages", "engine/core/test_scheduler.py",
         "        if sequence.pages.not_finite:\n            return 0\n", ""),
        ("window-released-a-page-early", "engine/core/test_scheduler.py",
         "run.drop_before(first_page(pool.group, sequence.committed))",
         "run.drop_before(first_page(pool.group, sequence.committed) + 1)"),
    ),
    "engine/core/prefix.py": (
        ("any-pages-may-be-a-prefix", "engine/core/test_media.py", "sha256(key + data", "sha256(data"),
        ("equal-keys-of-other-spans", "engine/core/test_media.py", "item.length, item.spans)", "item.length)"),
        ("superseded-tails-stay", "engine/core/test_prefix.py", "self._tails.move_to_end(above, last=False)", "pass"),
        ("cache-evicts-what-is-used", "engine/core/test_prefix.py", "self._order.move_to_end(ancestor)", "pass"),
    ),
    "engine/core/masks.py": (
        ("thought-exceeds-its-budget", "engine/core/test_scheduler.py",
         "self._label + self._left", "self._label + self._left + 1"),
        ("grammar-holds-behind-its-call", "engine/core/test_masks.py",
         "if state.matcher.frees and state.matcher.complete:", "if False:"),
    ),
    "engine/rank/stages/report_stage.py": (
        ("failed-sum-is-served", "engine/rank/test_runner.py", "if (flags & ROW_ERROR).any():", "if False:"),
        ("hash-forgets-the-tokens", "engine/rank/test_runner.py", 'for name in ("chosen", "hidden"):', 'for name in ("hidden",):'),
    ),
    "engine/rank/adjustments.py": (
        ("last-tenants-adjustments-stay", "engine/rank/test_adjustments.py", " or self._flags[admission.slot]]", "]"),
        ("counts-run-into-in-the-prompt", "engine/rank/test_adjustments.py",
         "np.minimum(np.bincount(generated, minlength=len(self.ids)), MOST_COUNTED)",
         "np.bincount(generated, minlength=len(self.ids))"),
    ),
    "engine/weight_formats.py": (
        ("fp8-loads-without-scales", "engine/rank/test_odd_checkpoints.py",
         '= ("BF16", "F16", "F32")', '= ("BF16", "F16", "F32", "F8_E4M3")'),
    ),
    "engine/rank/load/slices.py": (
        ("scales-of-columns-are-cut", "engine/rank/test_weight_formats.py", "if unit == 0:", "if unit == 0 and cut.start == 0:"),
        ("up-rows-overwrite-gate-rows", "engine/rank/test_weights.py", 'share if part == "up" else 0', "0"),
    ),
    "engine/geometry.py": (
        ("fp32-pages-count-as-bf16", "deploy/test_settings.py", "* ITEMSIZE[self.dtype]", "* 2"),
        ("default-rope-is-partial", "engine/test_geometry.py engine/test_config_keys.py", 'if kind == "proportional":', "if True:"),
        ("last-layer-as-listed", "engine/test_geometry.py engine/test_config_keys.py",
         '[table[name] for name in names[:-1]] + ["full"]', "[table[name] for name in names]"),
    ),
    "kernels/admissions.py": (
        ("last-tenants-pages-stay", "engine/rank/test_slots.py", "table[slot] = 0", "pass"),
    ),
    "engine/rank/slots.py": (
        ("last-tenants-prompt-logprobs-stay", "engine/rank/test_slots.py", "self.prompt_scorings.pop(slot, None)", "pass"),
        ("min-tokens-counts-the-prompt", "engine/rank/test_slots.py", "admission.prompt + params.min_tokens", "params.min_tokens"),
    ),
    "engine/rank/sampler.py": (
        ("rank-of-a-logprob-is-off-by-one", "engine/rank/test_sampler.py", "(capped >= chosen)", "(capped > chosen)"),
        ("logprobs-are-not-normalised", "engine/rank/test_sampler.py",
         "(values - total).view(torch.int32)", "values.view(torch.int32)"),
    ),
    "engine/rank/worker.py": (
        ("steps-in-flight-are-dropped-at-stop", "engine/rank/test_overlap.py",
         "while running or self._launched:", "while running:"),
        ("idle-time-is-lost", "engine/rank/test_worker.py", "launched.idle_us + ", ""),
        ("ranks-say-late-what-they-have-read", "engine/rank/test_overlap.py",
         "self._runner.encode_stage.read)", "0)"),
    ),
    "engine/core/pending.py": (
        ("media-are-freed-unread", "engine/core/test_media.py", " and self.unused[0][0] <= read", ""),
        ("media-end-with-their-first-request", "engine/core/test_media.py", "self._uses[begin] or begin not in", "begin not in"),
    ),
    "engine/core/draft_policy.py": (
        ("times-keep-what-prompts-added", "engine/core/test_draft_policy.py",
         "alone = max(ms - prompt_ms, 0.1 * ms)", "alone = ms"),
        ("prompts-cost-drafts-nothing", "engine/core/test_draft_policy.py", " + self.prompt_ms", ""),
    ),
    "engine/rank/start_checks.py": (
        ("broken-model-starts", "engine/rank/test_weights.py", "if not rms >= MIN", "if rms < MIN"),
        ("ranks-disagree-on-a-fault", "engine/rank/test_start_checks.py", "parallel.all_reduce(flags).tolist()", "flags.tolist()"),
    ),
    "engine/front/client.py": (
        ("tail-of-a-finished-answer-is-lost", "engine/front/test_client.py",
         "> MAX_PILED_TOKENS and output.finish is None:", "> MAX_PILED_TOKENS:"),
        ("tpot-counts-the-first-token", "engine/front/test_reports.py engine/front/test_client.py",
         "(last - first) / (count - 1)", "(last - first) / count"),
    ),
    "engine/front/grammar_check.py": (
        ("verdicts-are-kept-for-ever", "engine/front/test_grammar_check.py", "if len(self._verdicts) > _REMEMBERED:", "if False:"),
        ("refused-grammar-is-let-in", "engine/front/test_grammar_check.py",
         "if wrong is not None:", "if wrong == 0:"),
    ),
    "engine/front/generation.py": (
        ("end-token-is-shown", "deploy/edge/test_api.py", "output.tokens[:-1] if _last(output)", "output.tokens if _last(output)"),
    ),
    "engine/front/text.py": (
        ("shorter-stop-string-wins", "engine/front/test_stop_strings.py",
         "= min(matches)", "= min(matches, key=lambda match: (match[0], -match[1]))"),
        ("half-a-character-is-shown", "engine/front/test_text.py",
         "out.append(self._decode(final=False))", "out.append(self._decode(final=True))"),
        ("prompt-begins-with-two-bos", "engine/front/test_text.py", " or ids[:1] == [self._bos_id]:", ":"),
    ),
    "engine/front/template.py": (
        ("messages-may-hold-control-tokens", "engine/front/test_text.py engine/front/test_history.py",
         "value = value.replace(opener, opener + sentinel)", "pass"),
        ("old-thoughts-are-sent-again", "engine/front/test_history.py engine/front/test_text.py",
         'return "".join(part.split("<|channel>")[0] for part in text.split("<channel|>"))', "return text"),
    ),
    "engine/front/reply.py": (
        ("answer-shows-a-thoughts-newline", "engine/front/test_reply.py",
         'self._held = "\\n" if text.endswith("\\n") else ""', 'self._held = ""'),
        ("cut-call-is-completed", "engine/front/test_reply.py",
         "self._end_open_call(complete=not cut)", "self._end_open_call(complete=True)"),
    ),
    "engine/front/call_grammar.py": (
        ("optional-argument-is-demanded", "engine/front/test_grammar.py engine/front/test_schema_features.py",
         "depth), key in required)", "depth), True)"),
        ("call-without-parameters-has-arguments", "engine/front/test_schema_features.py", '"properties" not in schema)', "True)"),
    ),
    "engine/front/tools.py": (
        ("same-tool-twice-is-let-in", "engine/front/test_tools.py", "if name in self._schemas:", "if False:"),
    ),
    "engine/front/constraints.py": (
        ("required-call-may-be-several", "engine/front/test_grammar.py deploy/edge/test_reply_forms.py",
         "1 if self.choice.one else None", "None"),
    ),
    "deploy/edge/serving/job_run.py": (
        ("cached-tokens-of-choices-are-the-most", "deploy/edge/test_api.py", "sum(min(cached[", "sum(max(cached["),
        ("choices-share-media-bytes", "deploy/edge/test_images.py", "choices * sum(item.size", "sum(item.size"),
    ),
    "deploy/edge/serving/http_answer.py": (
        ("slow-client-is-waited-for", "deploy/edge/test_streams.py",
         'await bounded(send({"type": "http.response.body", "body": body, "more_body": more}), timeout_s)',
         'await send({"type": "http.response.body", "body": body, "more_body": more})'),
    ),
    "deploy/edge/jobs/job_builder.py": (
        ("choices-share-noise", "deploy/edge/test_api.py", "[(first ^ (_MIX * choice))", "[(first + choice)"),
        ("ignore-eos-is-ignored", "deploy/edge/test_api.py",
         "() if sampling.ignore_eos else self.text.eos_ids", "self.text.eos_ids"),
        ("anybody-may-jump-the-queue", "deploy/edge/test_sharing.py deploy/edge/test_validation.py",
         "if ask.priority < (most := limits.min_priority):", "if False:"),
    ),
    "deploy/edge/service_settings.py": (
        ("greedy-checkpoint-samples", "deploy/edge/test_validation.py deploy/edge/test_api.py",
         'if config.get("do_sample") is False:', "if False:"),
    ),
    "deploy/edge/serving/service.py": (
        ("holders-of-keys-share-a-cache", "deploy/edge/test_sharing.py deploy/edge/test_keys.py",
         "        if isolated:", "        if False:"),
    ),
    "deploy/edge/admission_control.py": (
        ("waiting-tokens-unbounded", "deploy/edge/test_admission.py",
         "if waiting and waiting + tokens > self.tokens:", "if False:"),
        ("places-leak", "deploy/edge/test_admission.py", "_claim(-self._reserved, -self._answers)", "_claim(-self._reserved, 0)"),
        ("modest-client-gives-way", "deploy/edge/test_admission.py", "if held[greediest] <= held[client] + choices:", "if False:"),
        ("newcomer-goes-first", "deploy/edge/test_admission.py",
         "min((other.turn for other in waiting), default=self._turn)", "0"),
        ("open-answers-unbounded", "deploy/edge/test_admission.py",
         "if self._open_answers + answers > ANSWERS_PER_CHOICE * self.choices:", "if False:"),
    ),
    "deploy/edge/guards/uploads.py": (
        ("body-may-be-any-size", "deploy/edge/test_limits.py", "if len(upload.body) > self.limits.body_bytes:", "if False:"),
        ("media-take-the-room-of-text", "deploy/edge/test_uploads.py",
         "self._uploads.media if size > LONGEST_TEXT_BYTES", "self._uploads.texts if size > LONGEST_TEXT_BYTES"),
        ("guard-gives-back-too-early", "deploy/edge/test_uploads.py",
         "if asyncio.get_running_loop() not in _APPLICATIONS:", "if True:"),
    ),
    "engine/front/turns.py": (
        ("first-client-takes-all", "engine/front/test_turns.py",
         "if self._held[client] + amount > self.most - self._total:", "if amount > self.most - self._total:"),
        ("last-place-is-anybodys", "engine/front/test_turns.py", "if free < 1 or is_kept:", "if free < 1:"),
    ),
    "deploy/edge/guards/limits.py": (
        ("any-host-is-ours", "deploy/edge/test_browsers.py",
         "if limits.hosts is not None and match[1].decode().lower() not in map(str.lower, limits.hosts):", "if False:"),
        ("clients-steer-the-deadline", "deploy/edge/test_limits.py", "if name.lower() not in STRIPPED_HEADERS", "if True"),
    ),
    "deploy/edge/keys/key_ring.py": (
        ("expired-key-passes", "deploy/edge/test_keys.py deploy/edge/test_key_file.py",
         "if match is None or match.has_expired(datetime.now(UTC))", "if match is None"),
    ),
    "deploy/edge/keys/replica_quotas.py": (
        ("keys-read-again-are-fresh", "deploy/edge/test_keys.py",
         "self._here.get(holder) or Allowance(quota)", "Allowance(quota)"),
    ),
    "deploy/edge/guards/key_gate.py": (
        ("any-key-has-all-rights", "deploy/edge/test_keys.py", 'elif endpoint.right not in {"open", *key.rights}:', "elif False:"),
    ),
    "deploy/edge/keys/quotas.py": (
        ("quota-fills-by-the-second", "deploy/edge/test_quotas.py", "MINUTE = 60.0", "MINUTE = 1.0"),
    ),
    "deploy/edge/http/error_response.py": (
        ("overload-does-not-say-when", "deploy/edge/test_admission.py deploy/edge/test_api.py",
         'headers["retry-after"] = str(error.retry_after_s)', "pass"),
    ),
    "deploy/edge/openai/forms.py": (
        ("minus-infinity-in-json", "deploy/edge/test_whole_answers.py deploy/edge/test_api.py deploy/edge/test_prompt_logprobs.py",
         "    if math.isfinite(logprob):", "    if True:"),
    ),
    "deploy/edge/openai/response_stream.py": (
        ("first-delta-is-shown-twice", "deploy/edge/test_responses.py",
         'self._part_event("added", block, "")', 'self._part_event("added", block, block.text)'),
    ),
    "deploy/edge/openai/data_events.py": (
        ("unfinished-stream-says-done", "deploy/edge/test_streams.py deploy/edge/test_api.py",
         "return data_event(OPENAI_ERROR.body(error))", "return data_event(OPENAI_ERROR.body(error)) + DONE"),
    ),
    "deploy/edge/anthropic/message_format.py": (
        ("messages-count-cached-tokens-twice", "deploy/edge/test_messages.py",
         '"input_tokens": usage.prompt - usage.cached', '"input_tokens": usage.prompt'),
    ),
    "kernels/filters.py": (
        ("top-p-draws-from-too-few", "kernels/test_filters.py", "1.00001", "0.9"),
    ),
    "kernels/choose.py": (
        ("negative-zero-is-never-seen", "kernels/test_choose.py", "tl.where(sent == _EMPTY, 0, sent)", "sent"),
        ("nan-row-gives-a-token", "engine/rank/test_sampler.py", "bad = nan.any(-1)", "bad = nan.any(-1) & False"),
    ),
    "kernels/table_check.py": (
        ("needed-null-page-is-missed", "kernels/test_table_check.py",
         "bad = needed & ((value != correct) | (correct == 0))", "bad = needed & (value != correct)"),
    ),
    "kernels/adjust.py": (
        ("device-count-runs-into-in-the-prompt", "engine/rank/test_adjustments.py",
         "(tl.minimum((bits & _MOST) + 1, _MOST) | (bits & _PROMPT))", "(((bits & _MOST) + 1) | (bits & _PROMPT))"),
        ("repetition-raises-bad-logits", "engine/rank/test_adjustments.py",
         "torch.where(x > 0, x / repetition, x * repetition)", "x / repetition"),
        ("frequency-penalty-rewards", "engine/rank/test_adjustments.py", "x = x - frequency * times", "x = x + frequency * times"),
    ),
    "kernels/candidates.py": (
        ("candidates-ignore-top-p", "kernels/test_candidates.py",
         "searching = tl.where((top_p >= 1.0) |", "searching = tl.where((top_p >= 0.0) |"),
    ),
    "kernels/sample.py": (
        ("top-k-keeps-one-more", "kernels/test_sample.py",
         "torch.arange(width, device=scaled.device) < torch.where", "torch.arange(width, device=scaled.device) <= torch.where"),
    ),
    "kernels/paged_attention.py": (
        ("window-shows-one-key-more", "kernels/test_decode.py",
         "keys > positions[..., None] - window", "keys >= positions[..., None] - window"),
        ("unseen-nan-is-summed", "kernels/test_decode.py", "if not v.sum().isfinite():", "if False:"),
    ),
    "kernels/splitkv.py": (
        ("kernel-window-shows-one-key-more", "kernels/test_decode.py",
         "oldest = tl.maximum(position - WINDOW + 1, 0)", "oldest = tl.maximum(position - WINDOW, 0)"),
    ),
    "kernels/qkv.py": (
        ("padding-rows-write-into-pages", "kernels/test_qkv.py", "if not live.all():", "if False:"),
    ),
    "kernels/route.py": (
        ("expert-weights-are-not-normalised", "kernels/test_experts.py",
         "weights / weights.sum(-1, keepdim=True) *", "weights *"),
    ),
    "kernels/experts.py": (
        ("kernel-experts-tokens-are-swapped", "kernels/test_experts.py",
         "tl.load(order + row, row < end, 0) // TOP", "tl.load(order + row, row < end, 0) % TOP"),
    ),
    "kernels/norm.py": (
        ("residual-before-the-norm", "kernels/test_norm.py",
         "total = residual + rms_norm(x, weight, eps)", "total = rms_norm(residual + x, weight, eps)"),
    ),
    "cluster/health.py": (
        ("suspended-machine-kills-its-group", "cluster/test_health.py",
         "if now - self._looked_ns > (PERIOD_S +", "if 0 > (PERIOD_S +"),
        ("ranks-that-differ-go-on", "cluster/test_health.py", "if len(holders) > 1:", "if False:"),
    ),
    "cluster/children.py": (
        ("error-hides-the-signal", "cluster/test_children.py cluster/test_health.py",
         "return self.code is not None and self.code < 0", "return False"),
    ),
    "cluster/capability.py": (
        ("visible-devices-in-any-order", "cluster/test_capability.py",
         "if len(matches) != 1 or matches[0] in shown:", "if len(matches) != 1:"),
    ),
    "engine/memory.py": (
        ("padding-slots-tables-not-counted", "engine/test_memory.py",
         "return (max_seqs + 1) * (counts", "return max_seqs * (counts"),
    ),
    "engine/plan.py": (
        ("largest-plan-a-page-short", "engine/core/test_scheduler.py", "seqs * -(-width // page))", "seqs * (width // page))"),
    ),
    "engine/channel.py": (
        ("torn-record-is-read", "engine/test_channel.py",
         "whole = len(payload) == size and checksum(payload, step & 0xFFFFFFFF) == expected", "whole = len(payload) == size"),
        ("part-of-a-record-is-read", "engine/test_channel.py", "whole = len(payload) == size and checksum(", "whole = checksum("),
    ),
    "engine/rank/stages/encode_stage.py": (
        ("media-are-not-waited-for", "engine/rank/test_encode_stage.py", "        self._media.finish()", "        pass"),
        ("steps-wait-for-media", "engine/rank/test_encode_stage.py",
         "        if self._media.advance():", "        if self._media.left and self._media.finish() is None:"),
        ("every-rank-reads-all", "engine/rank/test_encode_stage.py", "places += accumulate((one.nbytes", "places += accumulate((0"),
        ("items-that-end-are-kept", "engine/rank/test_encode_stage.py",
         "if left.item.end > chunk.end]", "if left.item.end >= chunk.end]"),
    ),
    "engine/protocol.py": (
        ("frames-run-into-each-other", "engine/front/test_client.py engine/core/test_loop.py",
         "if len(self._buffer) < end:", "if False:"),
    ),
    "engine/rank/load/loader.py": (
        ("heads-of-any-shape-are-compared", "engine/rank/test_odd_checkpoints.py",
         "head.shape == table.shape == shape and ", ""),
    ),
    "engine/rank/models/clipped.py": (
        ("bounds-of-any-shape-are-read", "engine/rank/test_vision.py", "if bound.numel() != 1 or bound.isnan():", "if False:"),
    ),
    "engine/rank/models/assistant_geometry.py": (
        ("drafter-looks-at-more-clusters-than-there-are", "engine/rank/test_assistant.py",
         "not 0 < assistant.centroid_top_k <= assistant.centroids", "not 0 < assistant.centroid_top_k"),
        ("drafters-numbers-are-not-checked", "engine/rank/test_assistant.py",
         "msgspec.convert(msgspec.to_builtins(assistant), AssistantGeometry)", "pass"),
    ),
    "engine/attention/flashinfer_files.py": (
        ("old-flashinfer-ends-the-start", "engine/attention/test_flashinfer_files.py", "if artifacts.exists():", "if True:"),
    ),
    "deploy/edge/media/media_preparer.py": (
        ("clips-of-a-sound-share-rows", "deploy/edge/test_clips.py",
         "digest_of(medium.kind, shape, clip), ()", "medium.digest, ()"),
    ),
    "deploy/edge/bodies/raw_json.py": (
        ("small-values-of-any-size", "deploy/edge/test_body_bounds.py deploy/edge/test_validation.py",
         "if len(memoryview(given)) > most:", "if False:"),
        ("marks-of-media-unbounded", "deploy/edge/test_body_bounds.py", "if marks > _MEDIA_MARKS:", "if False:"),
    ),
    "deploy/edge/observe/record.py": (
        ("queued-prompts-are-paid", "deploy/edge/test_body_bounds.py",
         "if all(clock.scheduled is None for clock in self.clocks):", "if not self.clocks:"),
    ),
    "deploy/edge/processes/side_process.py": (
        ("side-process-takes-any-time", "deploy/edge/test_body_bounds.py",
         "resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))", "pass"),
        ("side-process-takes-any-memory", "deploy/edge/test_body_bounds.py",
         "resource.setrlimit(resource.RLIMIT_DATA, (most, most))", "pass"),
    ),
    "deploy/edge/media/rasters.py": (
        ("budget-shrinks-one-side", "deploy/edge/test_rasters.py",
         "rows >= height and columns >= width", "rows >= height or columns >= width"),
    ),
    "deploy/edge/media/videos.py": (
        ("frames-to-decode-unbounded", "deploy/edge/test_videos.py",
         "if pixels > FILMED_PIXELS:", "if False:"),
        ("discarded-packets-are-shown", "deploy/edge/test_videos.py",
         "for number, packet in enumerate(packets) if not packet.is_discard]", "for number, packet in enumerate(packets)]"),
        ("times-far-apart-are-one", "deploy/edge/test_videos.py", "> 2 * tick", "> 200 * tick"),
        ("decoder-takes-any-pixels", "deploy/edge/test_videos.py",
         'stream.codec_context.options = {"max_pixels": str(task.pixels)}', "pass"),
        ("one-key-frame-back", "deploy/edge/test_videos.py",
         "bisect_right(keys, number)][-2:]", "bisect_right(keys, number)][-1:]"),
    ),
    "deploy/edge/media/audio_features.py": (
        ("cut-where-quiet-begins", "deploy/edge/test_audio_features.py", " + _QUIET // 2", ""),
    ),
    "kernels/sequence_parallel.py": (
        ("rows-left-over-have-no-memory", "engine/rank/test_sequence_parallel.py", "(rows // size + 3)", "(rows // size)"),
        ("own-part-is-summed-first", "engine/rank/test_sequence_parallel.py",
         "torch.cat([others[:rank], own[None], others[rank:]])", "torch.cat([own[None], others])"),
    ),
    "engine/vision_geometry.py": (
        ("pictures-have-any-side", "engine/test_media_items.py", "or shape[-3] % SIDE or shape[-2] % SIDE or", "or"),
        ("pictures-have-any-length", "engine/test_media_items.py", "max(height, width) > SIDE * self.longest or ", ""),
    ),
    "deploy/edge/bodies/form_reader.py": (
        ("cut-form-is-whole", "deploy/edge/test_body_bounds.py", 'if not end.startswith(b"--"):', "if False:"),
    ),
}  # fmt: skip

FAULTS = tuple(Fault(name, file, old, new, tests) for file, rows in _BY_FILE.items() for name, tests, old, new in rows)
