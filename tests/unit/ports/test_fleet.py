"""What drifts by the announcements is what an operator would count from them."""

from functools import reduce

from hypothesis import given
from hypothesis import strategies as st

from omnidraft.ports import Announcement, DriftingTraffic

WORKS = ("text", "constrained", "tools")
announcements = st.lists(
    st.builds(
        lambda kind, tenant, work: Announcement(0, kind, tenant=tenant, work=work),
        st.sampled_from(["drift", "drift_over"]),
        st.sampled_from(["a", "b"]),
        st.sampled_from(WORKS),
    )
)


def after(*said: Announcement) -> DriftingTraffic:
    return reduce(DriftingTraffic.after, said, DriftingTraffic())


def drift(tenant: str, work: str, kind: str = "drift") -> Announcement:
    return Announcement(0, kind, tenant=tenant, work=work)  # type: ignore[arg-type]


def test_the_drift_of_one_kind_is_that_of_no_other_kind_and_no_other_tenant() -> None:
    traffic = after(drift("a", "text"))
    assert [traffic.includes("a", work) for work in WORKS] == [True, False, False]
    assert traffic.includes("a")
    assert not traffic.includes("b")


def test_the_end_of_one_kinds_drift_ends_no_other() -> None:
    traffic = after(drift("a", "text"), drift("a", "constrained"), drift("a", "text", "drift_over"))
    assert [traffic.includes("a", work) for work in WORKS] == [False, True, False]


@given(announcements)
def test_a_tenants_traffic_drifts_by_its_own_announcements_alone(said: list[Announcement]) -> None:
    for tenant in ("a", "b"):
        own = after(*[each for each in said if each.tenant == tenant])
        assert [after(*said).includes(tenant, work) for work in WORKS] == [own.includes(tenant, work) for work in WORKS]


@given(announcements)
def test_announcements_in_force_say_what_all_of_them_said(said: list[Announcement]) -> None:
    """A follower that starts late reads the last one of each tenant and kind."""
    last = {(each.tenant, each.work): place for place, each in enumerate(said)}
    in_force = [said[place] for place in sorted(last.values())]
    assert after(*in_force) == after(*said)
