"""Pair secrets: exchanged once, bound to one charter, and erased slot by slot."""

import json

from pate_torch.sites import pairs
from pate_torch.sites.charter import make_charter, read_charter
from pate_torch.sites.pairs import accept_bundle, bundle_confirmations, confirm_charter
from pate_torch.sites.rounds import answer
from tests.sites.site_tables import make_terms
from tests.sites.site_worlds import confirm_all, draw_nothing, make_charter_world, make_world, refuse


def read_secrets(site):
    with site.open() as secrets:
        return secrets


def test_both_sites_of_a_pair_hold_the_same_secret_and_no_other_pair_does(tmp_path):
    world = make_world(tmp_path, 5)
    secrets = [read_secrets(site) for site in world.sites]
    by_pair = {(i, j): secrets[i].pair_secrets[str(j)] for i in range(5) for j in range(5) if i != j}
    assert all(by_pair[i, j] == by_pair[j, i] for i, j in by_pair)
    assert len(set(by_pair.values())) == 10
    assert all(s.ciphertexts[str(j)] == secrets[j].ciphertexts[str(i)] for i, s in enumerate(secrets) for j in range(i))
    assert all(s.kem_seed == "" for s in secrets)  # the decapsulation keys are erased
    sizes = [len(raw) for raw in world.confirmations.values()]
    assert sizes[0] - sizes[4] == 4 * pairs.CIPHERTEXT_BYTES + 3  # digits of the length


def test_a_charter_is_confirmed_once_and_with_its_own_words(tmp_path):
    world = make_charter_world(tmp_path)
    site, words = world.sites[0], world.charter.format_fingerprint()
    other = read_charter(make_charter([s.key_file for s in world.sites], make_terms(3, colluding=0), world.joiner))
    refuse(
        confirm_charter, site, world.charter.raw, other.format_fingerprint(), match="the sites hold different charters"
    )
    refuse(confirm_charter, site, world.charter.raw, "abandon", match="words='1 words': must be 24")
    assert read_secrets(site).charter == ""
    first = confirm_charter(site, world.charter.raw, words)
    assert confirm_charter(site, world.charter.raw, words) == first
    refuse(confirm_charter, site, other.raw, other.format_fingerprint(), match="differs from the charter of these keys")


def test_bundles_need_one_confirmation_of_each_site(tmp_path):
    world, other = confirm_all(make_charter_world(tmp_path / "a")), confirm_all(make_charter_world(tmp_path / "b"))
    files = world.confirmations
    short = {name: files[name] for name in list(files)[:2]}
    cut = files | {"1.confirmed": files["1.confirmed"][:-300]}
    altered = files["0.confirmed"].replace(b'"place":0', b'"place":1')
    for confirmations, match in (
        (short, "confirmation='Clinic C': is missing"),
        (files | {"again": files["1.confirmed"]}, "is the second one of Universität B"),
        (cut, "confirmation='1.confirmed': has another length"),
        (files | {"0.confirmed": altered}, "is not signed by Universität B, or was altered"),
        (files | {"0.confirmed": other.confirmations["0.confirmed"]}, "belongs to another charter"),
        (files | {"0.confirmed": world.bundle}, "is not a file of the kind 'pate-sites-1 confirmation'"),
    ):
        refuse(bundle_confirmations, world.charter, confirmations, world.joiner, match=match)


def test_a_site_finds_a_joiner_that_swaps_alters_or_exchanges_confirmations(tmp_path):
    world = confirm_all(make_charter_world(tmp_path))
    files = list(world.confirmations.values())

    def bundle(parts, **changes):
        content = {"lengths": [len(part) for part in parts]} | changes
        return world.charter.make_file("bundle", content, world.joiner, b"".join(parts))

    flipped = bytearray(files[0])
    flipped[400] ^= 1
    with world.sites[2].open() as secrets:
        twice = world.charter.make_file("confirmation", {"place": 2}, secrets.signer, b"")
        assert twice == files[2]  # a site without higher places has one confirmation alone
        short = world.charter.make_file("confirmation", {"place": 0}, secrets.signer, b"")
    for parts, match in (
        ([files[1], files[0], files[2]], "has the confirmation of Universität B in the place of another"),
        ([bytes(flipped), *files[1:]], "is not signed by Anna Hospital, or was altered"),
        ([short, *files[1:]], "is not signed by Anna Hospital"),
        (files[:2], "must have one confirmation for each site"),
    ):
        refuse(accept_bundle, world.sites[2], bundle(parts), match=match)
    refuse(accept_bundle, world.sites[2], bundle(files, lengths=[1, 1, 1]), match="must have one confirmation")
    refuse(accept_bundle, world.sites[2], bundle(files)[:-5], match="another length")
    assert read_secrets(world.sites[2]).kem_seed  # nothing was used up
    accept_bundle(world.sites[2], bundle(files))


def test_a_second_confirmation_of_a_dishonest_site_changes_nothing(tmp_path):
    world = make_world(tmp_path)
    with world.sites[0].open() as secrets:
        forged = world.charter.make_file(
            "confirmation", {"place": 0}, secrets.signer, bytes(2 * pairs.CIPHERTEXT_BYTES)
        )
    second = bundle_confirmations(world.charter, world.confirmations | {"0.confirmed": forged}, world.joiner)
    before = read_secrets(world.sites[2])
    refuse(accept_bundle, world.sites[2], second, match="other ciphertexts than the bundle that this site accepted")
    refuse(accept_bundle, world.sites[0], second, match="another confirmation of this site than the site wrote")
    accept_bundle(world.sites[2], world.bundle)
    assert read_secrets(world.sites[2]) == before


def test_each_slot_has_its_own_secret_and_old_ones_are_erased(tmp_path):
    world = make_world(tmp_path, num_slots=4)
    site, path = world.sites[1], world.sites[1].folder / "secrets.json"
    start = read_secrets(site)
    answer(site, world.ask(slot=2, shape=(1,)), [5], draw=draw_nothing)
    stored = path.read_text()
    after = json.loads(stored)
    assert list(after["slot_keys"]) == ["3"] and after["next_slot"] == 3
    for peer in ("0", "2"):
        chain = [bytes.fromhex(start.pair_secrets[peer])]
        for _ in range(3):
            chain.append(pairs.derive_next_secret(chain[-1]))
        assert after["pair_secrets"][peer] == chain[3].hex()
        assert not any(secret.hex() in stored for secret in chain[:3])
        assert not any(pairs.derive_slot_secret(secret).hex() in stored for secret in chain)
    assert not any(start.slot_keys[slot] in stored for slot in "012")


def test_take_slot_gives_both_sites_the_same_secret_whatever_was_passed_over(tmp_path):
    world = make_world(tmp_path, num_slots=4)
    first, second = (read_secrets(site) for site in world.sites[:2])
    assert pairs.take_slot(first, 0)[1][1] == pairs.take_slot(second, 0)[1][0]
    _, early = pairs.take_slot(first, 1)
    _, at_first = pairs.take_slot(first, 3)
    _, at_second = pairs.take_slot(second, 3)
    assert at_first[1] == at_second[0] != early[1]
