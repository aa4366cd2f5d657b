"""The Ray cluster that this machine is in. Ray is an extra: it is imported where it is used."""

from __future__ import annotations

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
    try:
        ray.init(address=address, namespace=namespace, ignore_reinit_error=True)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(
            f"there is no Ray cluster at {address}: {str(error).splitlines()[0]}; start one with "
            "'ray start --head', or let one be made here with --address local (where RAY_ADDRESS "
            "names a cluster with tokens, set RAY_AUTH_MODE=token)"
        ) from None
    return str(ray.get_runtime_context().gcs_address)
