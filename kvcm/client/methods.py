"""The methods that the blocking and the asyncio clients have in common: one a call."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, Protocol, TypeVar, cast, overload

from kvcm.client import admin_calls, calls
from kvcm.client.addresses import ADMIN_PORTS
from kvcm.client.call import Call, describe_method

if TYPE_CHECKING:
    from kvcm.client.aio import AsyncCaller
    from kvcm.client.sync import SyncCaller

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class ClientMethod(Protocol[P, T_co]):
    """What a method is to a type checker: a coroutine in the clients that are asyncio's."""

    @overload
    def __get__(self, client: SyncCaller, owner: Any = None) -> Callable[P, T_co]: ...
    @overload
    def __get__(
        self, client: AsyncCaller, owner: Any = None
    ) -> Callable[P, Coroutine[Any, Any, T_co]]: ...
    @overload
    def __get__(self, client: None, owner: Any = None) -> Callable[..., Any]: ...


def _method(builder: Callable[P, Call[T]]) -> ClientMethod[P, T]:
    # `call` of an asyncio client gives the coroutine.
    def method(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        return self.call(builder(*args, **kwargs))

    return cast(ClientMethod[P, T], describe_method(method, builder))


class MetaMethods:
    """MetaService."""

    register_instance = _method(calls.register_instance)
    get_instance_info = _method(calls.get_instance_info)
    get_cache_location = _method(calls.get_cache_location)
    get_cache_meta = _method(calls.get_cache_meta)
    start_write_cache = _method(calls.start_write_cache)
    finish_write_cache = _method(calls.finish_write_cache)
    remove_cache = _method(calls.remove_cache)
    trim_cache = _method(calls.trim_cache)
    report_cache_error = _method(calls.report_cache_error)


class AdminMethods:
    """AdminService."""

    default_ports: ClassVar[dict[str, int]] = ADMIN_PORTS

    add_storage = _method(admin_calls.add_storage)
    enable_storage = _method(admin_calls.enable_storage)
    disable_storage = _method(admin_calls.disable_storage)
    remove_storage = _method(admin_calls.remove_storage)
    update_storage = _method(admin_calls.update_storage)
    list_storage = _method(admin_calls.list_storage)
    create_instance_group = _method(admin_calls.create_instance_group)
    update_instance_group = _method(admin_calls.update_instance_group)
    remove_instance_group = _method(admin_calls.remove_instance_group)
    get_instance_group = _method(admin_calls.get_instance_group)
    get_cache_meta = _method(admin_calls.get_cache_meta)
    remove_cache = _method(admin_calls.remove_cache)
    register_instance = _method(admin_calls.register_instance)
    remove_instance = _method(admin_calls.remove_instance)
    get_instance_info = _method(admin_calls.get_instance_info)
    list_instance_info = _method(admin_calls.list_instance_info)
    add_account = _method(admin_calls.add_account)
    delete_account = _method(admin_calls.delete_account)
    list_account = _method(admin_calls.list_account)
    gen_config_snapshot = _method(admin_calls.gen_config_snapshot)
    load_config_snapshot = _method(admin_calls.load_config_snapshot)
    get_metrics = _method(admin_calls.get_metrics)
    check_health = _method(admin_calls.check_health)
    get_manager_cluster_info = _method(admin_calls.get_manager_cluster_info)
    leader_demote = _method(admin_calls.leader_demote)
    get_leader_elector_config = _method(admin_calls.get_leader_elector_config)
    update_leader_elector_config = _method(admin_calls.update_leader_elector_config)
    update_logger = _method(admin_calls.update_logger)
