"""How far the log-probabilities of an engine's decode steps are from those of its prefill, for the same tokens.

An engine takes its own likeliest tokens, and tells their log-probabilities. Prompts and tokens then come back as
prompts, whose log-probabilities vLLM's prefill gives in chunks, without heads. An engine without errors gives the same
numbers up to rounding. This does not depend on near ties, in which two engines take different tokens, and needs no
second engine. A *gap* is the distance of a token's log-probability to the likeliest one's, by the prefill.
"""

import numpy as np


def draw_requests(count, prompts, outputs, vocabulary, seed, shared=0):
    """Prompts, and numbers of output tokens, from the ranges `prompts` and `outputs`.

    Every third prompt begins with the same `shared` tokens.
    """
    rng = np.random.default_rng(seed)
    common = rng.integers(0, vocabulary, size=shared).tolist()
    found = []
    for i in range(count):
        prompt = rng.integers(0, vocabulary, size=int(rng.integers(*prompts))).tolist()
        found.append((common * (i % 3 == 0) + prompt, int(rng.integers(*outputs))))
    return found


def serve(engine, requests, together, aborted=()):
    """Serve requests, `together` at a time: tokens and log-probabilities for each; None for an aborted request."""
    found = [None] * len(requests)
    options = [{"max_tokens": count, "logprobs": 0} for _, count in requests]
    for i, output in outputs_of(engine, [prompt for prompt, _ in requests], options, together, aborted):
        one = output.outputs[0]
        found[i] = (
            list(one.token_ids),
            [x[token].logprob for x, token in zip(one.logprobs, one.token_ids, strict=True)],
        )
    return found


def differences(engine, requests, served, together):
    """Differences of log-probabilities from the prefill's, and gaps, for each request; and the spread of the latter.

    The spread is the standard deviation of the log-probabilities of all tokens that are likeliest or in a prompt.
    """
    rows = [(prompt, *one) for (prompt, _), one in zip(requests, served, strict=True) if one is not None]
    prompts = [prompt + tokens for prompt, tokens, _ in rows]
    options = [{"max_tokens": 1, "prompt_logprobs": 1}] * len(rows)
    found, every = [], []
    for i, output in outputs_of(engine, prompts, options, together):
        prompt, tokens, logprobs = rows[i]
        places = output.prompt_logprobs[1:]
        every += [x.logprob for place in places for x in place.values()]
        mine = list(zip(places[len(prompt) - 1 :], tokens, logprobs, strict=True))
        wrong = [logprob - place[token].logprob for place, token, logprob in mine]
        gaps = [max(x.logprob for x in place.values()) - place[token].logprob for place, token, _ in mine]
        found.append((wrong, gaps))
    return [wrong for wrong, _ in found], [gaps for _, gaps in found], float(np.std(every))


def outputs_of(engine, prompts, options, together, aborted=()):
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
                yield i, output
        step += 1
        for i in [i for i, end in ends.items() if end <= step and i in running]:
            engine.abort_request([f"r{i}"])
            running.discard(i)


def summary(rows, spread):
    """Sizes of numbers of each request, as shares of `spread`; `worst_request` is the largest root mean square."""
    shares = [np.array(row) / spread for row in rows]
    every = np.abs(np.concatenate(shares))
    return {
        "requests": len(shares),
        "tokens": len(every),
        "spread": spread,
        "rms": float(np.sqrt(np.mean(every**2))),
        "p99": float(np.percentile(every, 99)),
        "largest": float(every.max()),
        "worst_request": max(float(np.sqrt(np.mean(x**2))) for x in shares),
    }
