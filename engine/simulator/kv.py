"""The KV pool of a simulated replica and the prefix cache that lives in it.

A radix tree as far as it matters here: texts with names, each continuing at most one other.
Tokens of a text that nobody uses are free for the asking, the longest unused first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from engine.simulator.workload import SimCall


@dataclass(slots=True)
class _Text:
    tokens: int
    """From the beginning of the prompt."""
    own_tokens: int
    """Of those what is not its parent's."""
    parent: int
    num_users: int = 0


class KvPool:
    """Counts tokens: of live requests, of cached texts in use, and of those that may go.

    Whoever uses a text holds the whole of it, and of what it continues.

    Args:
        total_tokens: that fit.
        has_cache: whether texts are kept for later prompts at all.
    """

    def __init__(self, total_tokens: int, *, has_cache: bool = True) -> None:
        self.total_tokens = total_tokens
        self._has_cache = has_cache
        self._own_tokens = 0
        """Held by live requests beside cached texts."""
        self._used_tokens = 0
        """Of cached texts that live requests use."""
        self._idle_tokens = 0
        """Of cached texts that nobody uses."""
        self._texts: OrderedDict[int, _Text] = OrderedDict()
        """The longest unused first; what continues a text before that text."""

    @property
    def available_tokens(self) -> int:
        """Free, or free for the asking."""
        return self.total_tokens - self._own_tokens - self._used_tokens

    @property
    def own_tokens(self) -> int:
        """Held by live requests beside cached texts."""
        return self._own_tokens

    def cached(self, call: SimCall) -> int:
        """Tokens of its prompt that are here already; never all of it: one is computed."""
        if not call.prefix_tokens:
            return 0
        text = self._texts.get(call.prefix)
        return 0 if text is None else min(text.tokens, call.prefix_tokens, call.input_tokens - 1)

    def fits(self, call: SimCall, tokens: int) -> bool:
        """Whether a request has room for a context of so many tokens, its cached prefix in use."""
        return self._needed(call, self.cached(call), tokens) <= self.available_tokens

    def begin(self, call: SimCall, tokens: int, *, uses_cache: bool = True) -> int:
        """A request takes its place with a context of so many tokens.

        Returns how many of them are cached. Raises ValueError where it does not fit.
        """
        hit = self.cached(call) if uses_cache else 0
        need = self._needed(call, hit, tokens)
        if need > self.available_tokens:
            raise ValueError(f"{need} tokens do not fit into {self.available_tokens}")
        if hit:
            self._use(call.prefix)
        self.grow(tokens - hit)
        return hit

    def _needed(self, call: SimCall, hit: int, tokens: int) -> int:
        """Tokens that are available no longer once it has begun."""
        need = tokens - hit
        name = call.prefix if hit else 0
        while name:
            text = self._texts[name]
            # What nobody uses is free for the asking, but not for whom it is to serve.
            need += 0 if text.num_users else text.own_tokens
            name = text.parent
        return need

    def grow(self, tokens: int) -> None:
        """Live requests take more. Raises ValueError where it does not fit."""
        if tokens > self.available_tokens:
            raise ValueError(f"{tokens} tokens do not fit into {self.available_tokens}")
        self._own_tokens += tokens
        while self._own_tokens + self._used_tokens + self._idle_tokens > self.total_tokens:
            self._evict()

    def share(self, call: SimCall, hit: int) -> int:
        """Its prompt is computed: the prefix is now cached for others; the tokens cached of it."""
        if not (self._has_cache and call.prefix_tokens > hit):
            return hit
        text = self._texts.get(call.prefix)
        known = 0 if text is None else text.tokens
        shared = call.prefix_tokens
        # What another has put there meanwhile this one holds a second time no longer.
        self._own_tokens -= shared - hit
        if text is None:
            self._texts[call.prefix] = _Text(shared, shared, 0, 1)
            self._used_tokens += shared
        else:
            if not hit:
                self._use(call.prefix)
            if shared > known:
                text.tokens, text.own_tokens = shared, text.own_tokens + shared - known
                self._used_tokens += shared - known
        return shared

    def detach(self, call: SimCall, hit: int) -> None:
        """A request holds its prefix of ``hit`` tokens by itself from now on: the text may go.

        For one that is alone: then its context fits.
        """
        self._unuse(call.prefix)
        self.grow(hit)

    def give_up(self, call: SimCall, hit: int, tokens: int) -> None:
        """A request loses its KV of so many tokens, of which ``hit`` are a cached prefix."""
        self._own_tokens -= tokens - hit
        if hit:
            self._unuse(call.prefix)

    def end(self, call: SimCall, hit: int, tokens: int) -> None:
        """A request is over; its context stays for those that continue it, if any can."""
        self._own_tokens -= tokens - hit
        if call.leaves and self._has_cache:
            self._leave(call, hit, tokens)
        if hit:
            self._unuse(call.prefix)

    def _leave(self, call: SimCall, hit: int, tokens: int) -> None:
        text = self._texts.get(call.leaves)
        if text is None:
            parent = call.prefix if hit else 0
            self._texts[call.leaves] = _Text(tokens, tokens - hit, parent)
            self._idle_tokens += tokens - hit
        elif tokens > text.tokens:
            more = tokens - text.tokens
            text.tokens, text.own_tokens = tokens, text.own_tokens + more
            if text.num_users:
                self._used_tokens += more
            else:
                self._idle_tokens += more
        self._touch(call.leaves)

    def _use(self, name: int) -> None:
        # Not among the first that ``_evict`` looks at.
        self._touch(name)
        while name:
            text = self._texts[name]
            if not text.num_users:
                self._used_tokens += text.own_tokens
                self._idle_tokens -= text.own_tokens
            text.num_users += 1
            name = text.parent

    def _unuse(self, name: int) -> None:
        self._touch(name)
        while name:
            text = self._texts[name]
            text.num_users -= 1
            if not text.num_users:
                self._used_tokens -= text.own_tokens
                self._idle_tokens += text.own_tokens
            name = text.parent

    def _touch(self, name: int) -> None:
        """It and what it continues are the last to go, the beginning last of all."""
        while name:
            text = self._texts.get(name)
            if text is None:
                return
            self._texts.move_to_end(name)
            name = text.parent

    def _evict(self) -> None:
        name = next(name for name, text in self._texts.items() if not text.num_users)
        self._idle_tokens -= self._texts.pop(name).own_tokens
