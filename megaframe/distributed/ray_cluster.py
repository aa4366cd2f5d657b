"""The Ray cluster that this machine is in. Ray is an extra: it is imported where it is used."""

from __future__ import annotations

import os
from pathlib import Path

from megaframe.errors import UserError


def connect_to_ray(address: str, namespace: str | None = None) -> str:
    """Connect to a cluster, unless this process already is, and return its address for other
    programs.

    Args:
        address: Of the cluster; auto for that of this machine, local to make one here.
        namespace: In which actors have names.

    Raises:
        UserError: If there is none, or Ray is not installed.
    """
    try:
        import ray
    except ImportError:
        raise UserError("Ray needs the extra 'ray': pip install 'megaframe[ray]'") from None
    if address != "local" and not ray.is_initialized():
        _send_token()
    try:
        ray.init(address=address, namespace=namespace, ignore_reinit_error=True)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(
            f"there is no Ray cluster at {address}: {str(error).splitlines()[0]}; start one with "
            "'ray start --head', or let one be made here with --address local (a cluster with a "
            "token needs that of its first node in ~/.ray/auth_token)"
        ) from None
    return str(ray.get_runtime_context().gcs_address)


def _send_token() -> None:
    """Send this user's token, if there is one. Ray (2.60) does so by itself for a cluster that it
    finds by the files of a session, but not for one that RAY_ADDRESS names."""
    from ray._raylet import Config  # type: ignore[attr-defined]

    given = {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys()
    has_token = given or (Path.home() / ".ray/auth_token").exists()
    if has_token and "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        Config.initialize("")  # which reads the variable, as it did when Ray was imported
