"""Random programs against a model: enters, exits, waits, exceptions, other libraries, threads.

The model knows nothing of the driver. It holds, for each thread, which context is current and what
each open scope found; after each step the driver must agree with it, on every thread.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import pytest
from cuda.bindings.driver import CUcontext, CUresult
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from dask_devctx import Device, driver
from dask_devctx.cuda.context import Context
from dask_devctx.cuda.scope import open_scopes
from dask_devctx.driver.simulated import SimulatedMachine
from dask_devctx.errors import DeviceScopeError, DriverError
from tests.addressed import addressed

THREADS = 3
# The calls of the driver that create an own context.
MAKING = ("cuCtxCreate", "cuCtxSetCurrent", "cuCtxGetId")
threads = st.integers(0, THREADS - 1)
ordinals = st.integers(0, 2)


class Model:
    """What is current on a thread, and what its open scopes found: names of contexts, or None."""

    def __init__(self):
        self.current = None
        self.entries = []  # scope, what it found


class Scopes(RuleBasedStateMachine):
    owned = Bundle("owned")
    make_backend = staticmethod(SimulatedMachine.backend)

    def __init__(self):
        super().__init__()
        self.machine = SimulatedMachine(3, host="model")
        self._use = driver.use(self.make_backend(self.machine))
        self.backend = self._use.__enter__()
        self.calls = self.backend.driver()
        self.threads = [ThreadPoolExecutor(1) for _ in range(THREADS)]
        self.workers = [self.on(thread) for thread in self.threads]
        self.models = [Model() for _ in range(THREADS)]
        self.closed = set()
        self.all_owned = []

    def on(self, thread):
        return lambda function: thread.submit(function).result(timeout=30)

    def handle(self, scope):
        return scope.primary_context.handle if isinstance(scope, Device) else scope.handle

    def enter(self, thread, scope, synchronized=False):
        """Enter a scope, or the one of it that waits; both leave the same entry."""
        entered = scope.synchronized() if synchronized else scope
        assert self.workers[thread](entered.__enter__) is scope
        model = self.models[thread]
        model.entries.append((scope, model.current))
        model.current = scope

    @rule(thread=threads, ordinal=ordinals, synchronized=st.booleans())
    def enter_device(self, thread, ordinal, synchronized):
        self.enter(thread, Device(ordinal), synchronized)

    @rule(target=owned, ordinal=ordinals)
    def make_context(self, ordinal):
        context = Context(ordinal)
        self.all_owned.append(context)
        return context

    @rule(thread=threads, ordinal=ordinals, function=st.sampled_from(MAKING))
    def make_one_that_fails(self, thread, ordinal, function):
        """Whichever call of it fails, the thread is as before and nothing is left alive."""
        self.machine.faults.inject(function, CUresult.CUDA_ERROR_UNKNOWN)
        alive = self.own_contexts_alive()
        with pytest.raises(DriverError, match=f"{function} failed with CUDA_ERROR_UNKNOWN"):
            self.workers[thread](lambda: Context(ordinal))
        assert self.own_contexts_alive() == alive

    def own_contexts_alive(self):
        contexts = self.machine.driver._contexts.values()
        return [one.id for one in contexts if one.alive and not one.is_primary]

    @rule(thread=threads, context=owned, synchronized=st.booleans())
    def enter_context(self, thread, context, synchronized):
        self.enter(thread, context, synchronized)

    def alive(self, scope):
        return scope not in self.closed

    def leave(self, thread, error, synchronized=False):
        """Leave the innermost scope, of whichever device, with or without an exception."""
        model = self.models[thread]
        scope, found = model.entries.pop()
        kind = None if error is None else type(error)
        left = scope.synchronized() if synchronized and self.alive(scope) else scope
        leave = lambda: left.__exit__(kind, error, None)  # noqa: E731
        if self.alive(found):
            assert self.workers[thread](leave) is False
            assert error is None or not hasattr(error, "__notes__")
            model.current = found
        else:
            if error is None:
                with pytest.raises(DeviceScopeError, match="destroyed"):
                    self.workers[thread](leave)
            else:
                assert self.workers[thread](leave) is False
                assert "destroyed" in error.__notes__[0]
            model.current = None

    @rule(thread=threads, raising=st.booleans(), synchronized=st.booleans())
    def exit(self, thread, raising, synchronized):
        if self.models[thread].entries:
            self.leave(thread, ValueError("body") if raising else None, synchronized)

    @rule(thread=threads)
    def exit_with_work_that_failed(self, thread):
        """The wait raises, and what was current before is current again all the same."""
        model = self.models[thread]
        if not model.entries or not self.alive(model.entries[-1][0]):
            return
        scope, found = model.entries.pop()
        self.machine.faults.inject("cuCtxSynchronize", CUresult.CUDA_ERROR_LAUNCH_FAILED)
        with pytest.raises(DriverError, match="CUDA_ERROR_LAUNCH_FAILED") as caught:
            self.workers[thread](lambda: scope.synchronized().__exit__(None, None, None))
        assert hasattr(caught.value, "__notes__") != self.alive(found)
        model.current = found if self.alive(found) else None

    @rule(thread=threads)
    def unset_current(self, thread):
        self.workers[thread](Device.unset_current)
        self.models[thread].current = None

    @rule(thread=threads, context=owned)
    def foreign_push_then_unset(self, thread, context):
        push = lambda: self.machine.driver.cuCtxPushCurrent(CUcontext(context.handle))  # noqa: E731
        self.workers[thread](push)
        self.workers[thread](push)
        self.unset_current(thread)

    @rule(thread=threads, place=st.integers(0, 5))
    def exit_out_of_order(self, thread, place):
        entries = self.models[thread].entries
        if place >= len(entries) - 1:
            return
        scope, found = entries[place]
        if any(other is scope for other, _ in entries[place + 1 :]):
            return  # a reentered scope: the innermost of its entries is the one that is left
        with pytest.raises(DeviceScopeError, match="entered after it"):
            self.workers[thread](lambda: scope.__exit__(None, None, None))
        above, _ = entries[place + 1]
        entries[place : place + 2] = [(above, found)]

    @rule(thread=threads, ordinal=ordinals)
    def exit_unentered(self, thread, ordinal):
        device = Device(ordinal)
        if all(scope is not device for scope, _ in self.models[thread].entries):
            with pytest.raises(DeviceScopeError, match="did not enter it"):
                self.workers[thread](lambda: device.__exit__(None, None, None))

    @rule(thread=threads, ordinal=ordinals)
    def foreign_set_device(self, thread, ordinal):
        handle = Device(ordinal).primary_context.handle
        self.workers[thread](lambda: self.calls.set_current(handle))
        self.models[thread].current = Device(ordinal)

    @rule(thread=threads, context=owned)
    def foreign_set_context(self, thread, context):
        self.workers[thread](lambda: self.calls.set_current(context.handle))
        self.models[thread].current = context

    @rule(thread=threads)
    def foreign_set_none(self, thread):
        self.workers[thread](lambda: self.calls.set_current(0))
        self.models[thread].current = None

    @rule(thread=threads, ordinal=ordinals)
    def failing_enter(self, thread, ordinal):
        Device(ordinal).primary_context.handle  # noqa: B018 - retained before
        self.machine.faults.inject("cuCtxSetCurrent", CUresult.CUDA_ERROR_UNKNOWN)
        with pytest.raises(Exception, match="CUDA_ERROR_UNKNOWN"):
            self.workers[thread](Device(ordinal).__enter__)

    @rule(context=owned, thread=threads)
    def close_that_is_refused(self, context, thread):
        self.machine.faults.inject("cuCtxDestroy", CUresult.CUDA_ERROR_LAUNCH_FAILED)
        with pytest.raises(DriverError, match="cuCtxDestroy"):
            self.workers[thread](context.close)
        assert context.handle

    @rule(context=consumes(owned), thread=threads)
    def close(self, context, thread):
        """Where it is current it stays so, dead, but on the thread that closes it."""
        self.workers[thread](context.close)
        self.closed.add(context)
        model = self.models[thread]
        if model.current is context:
            model.current = None

    @invariant()
    def driver_agrees(self):
        for worker, model in zip(self.workers, self.models, strict=True):
            handle = worker(self.calls.current)
            if model.current is None:
                assert handle == 0
            elif self.alive(model.current):
                assert handle == self.handle(model.current)
            assert worker(open_scopes) == tuple(scope for scope, _ in model.entries)

    def teardown(self):
        for thread, model in enumerate(self.models):
            while model.entries:
                self.leave(thread, None)
        self.driver_agrees()
        for context in self.all_owned:
            context.close()
        for thread in self.threads:
            thread.shutdown()
        self._use.__exit__(None, None, None)


TestScopes = Scopes.TestCase
TestScopes.settings = settings(max_examples=40, stateful_step_count=40)


class ScopesInC(Scopes):
    make_backend = staticmethod(addressed)


TestScopesInC = pytest.mark.skipif(
    find_spec("dask_devctx.driver._scope") is None, reason="the extension _scope was not built"
)(ScopesInC.TestCase)
TestScopesInC.settings = TestScopes.settings


class ManyScopes(Scopes):
    """The same, much longer."""


TestManyScopes = pytest.mark.long(ManyScopes.TestCase)
TestManyScopes.settings = settings(max_examples=300, stateful_step_count=40)
