"""Log-probabilities that engines give to the same tokens, so that two engines can be compared to rounding.

Greedy tokens of two engines differ from the first near tie on, and all tokens after it. Here each request has a
continuation of its own, which an engine must take whatever its logits are. vLLM reports log-probabilities before
logits processors, so they are the model's own, at every place behind the same tokens.
"""

import numpy as np


def draw_requests(count, prompts, outputs, vocabulary, seed):
    """Prompts and continuations of random tokens, with numbers of tokens in the ranges `prompts` and `outputs`."""
    rng = np.random.default_rng(seed)

    def tokens(sizes):
        return rng.integers(0, vocabulary, size=int(rng.integers(*sizes))).tolist()

    return [(tokens(prompts), tokens(outputs)) for _ in range(count)]


def processor():
    """Logits processor of an engine that serves these requests."""
    import torch
    from vllm.v1.sample import sampler
    from vllm.v1.sample.logits_processor import LogitsProcessor
    from vllm.v1.sample.logits_processor.builtin import process_dict_updates

    # Ranks are not used, and vLLM would compile their computation for seconds.
    sampler.batched_count_greater_than = lambda x, values: (x >= values).sum(-1)

    class ForcedTokens(LogitsProcessor):
        def __init__(self, vllm_config, device, is_pin_memory):
            self.device, self.rows = device, {}

        def is_argmax_invariant(self):
            return False

        def update_state(self, batch_update):
            process_dict_updates(self.rows, batch_update, lambda given, _, made: (given.extra_args["forced"], made))

        def apply(self, logits):
            chosen = [0] * len(logits)
            for row, (forced, made) in self.rows.items():
                chosen[row] = forced[min(len(made), len(forced) - 1)]
            index = torch.tensor(chosen, device=self.device)
            return logits.fill_(-torch.inf).scatter_(1, index[:, None], 0.0)

    return ForcedTokens


def serve(engine, requests, together, aborted=(), gaps=False):
    """Serve requests, `together` at a time: a list of log-probabilities for each; None for an aborted request.

    A request in `aborted` ends after some steps. An engine that takes other tokens than those it must is an error.
    With `gaps`, the lists have the distances to the log-probabilities of the likeliest tokens, 0 or more.
    """
    found = [None] * len(requests)
    options = [{"max_tokens": len(forced), "logprobs": 1, "extra_args": {"forced": forced}} for _, forced in requests]
    for i, one in outputs_of(engine, [prompt for prompt, _ in requests], options, together, aborted):
        forced = requests[i][1]
        if list(one.token_ids) != forced:
            raise RuntimeError(f"request {i}: expected the tokens {forced}, got {list(one.token_ids)}")
        found[i] = [place[token].logprob for place, token in zip(one.logprobs, forced, strict=True)]
        if gaps:
            best = [max(x.logprob for x in place.values()) for place in one.logprobs]
            found[i] = [x - y for x, y in zip(best, found[i], strict=True)]
    return found


def generate(engine, requests, together, aborted=()):
    """Serve requests with the engine's own likeliest tokens: lists of tokens, of the continuations' lengths."""
    found = [None] * len(requests)
    options = [{"max_tokens": len(tokens)} for _, tokens in requests]
    for i, one in outputs_of(engine, [prompt for prompt, _ in requests], options, together, aborted):
        found[i] = list(one.token_ids)
    return found


def outputs_of(engine, prompts, options, together, aborted):
    """Yield number and output of each request that is not aborted, with `options` of its sampling."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    common = {"temperature": 0.0, "ignore_eos": True, "detokenize": False, "output_kind": RequestOutputKind.FINAL_ONLY}
    ends, running, step = {}, set(), 0
    waiting = iter(range(len(prompts)))
    while True:
        while len(running) < together and (i := next(waiting, None)) is not None:
            engine.add_request(f"r{i}", {"prompt_token_ids": prompts[i]}, SamplingParams(**common, **options[i]))
            running.add(i)
            if i in aborted:
                ends[i] = step + 3
        if not engine.has_unfinished_requests():
            return
        for output in engine.step():
            i = int(output.request_id.removeprefix("r"))
            if not output.finished or i not in running:
                continue
            running.discard(i)
            if i not in aborted:
                yield i, output.outputs[0]
        step += 1
        for i in [i for i, end in ends.items() if end <= step and i in running]:
            engine.abort_request([f"r{i}"])
            running.discard(i)


def compare(found, wanted):
    """Differences of log-probabilities of the same tokens, as shares of the spread (standard deviation) of `wanted`.

    `worst_request` is the largest root mean square of a request.
    """
    pairs = [(np.array(x), np.array(y)) for x, y in zip(found, wanted, strict=True) if x is not None and y is not None]
    spread = float(np.concatenate([y for _, y in pairs]).std())
    differences = [(x - y) / spread for x, y in pairs]
    every = np.abs(np.concatenate(differences))
    return {
        "requests": len(pairs),
        "tokens": len(every),
        "spread": spread,
        "rms": float(np.sqrt(np.mean(every**2))),
        "p99": float(np.percentile(every, 99)),
        "largest": float(every.max()),
        "worst_request": max(float(np.sqrt(np.mean(x**2))) for x in differences),
    }
