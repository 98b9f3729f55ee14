"""`detect` on outputs of nvidia-smi, rocm-smi and amd-smi, and what it refuses."""

import pytest

from k3c.errors import ConfigError, DeviceFault
from k3c.targets import detect as detect_module
from k3c.targets.detect import detect
from k3c.targets.topology import load_topology
from tests.support.topologies import MACHINES, parse


def detected(name, hosts=1):
    return parse(detect(MACHINES / name, hosts))


def edited(tmp_path, name, **changes):
    """Copy a machine's dumps and replace text in some; None takes a dump away."""
    for path in (MACHINES / name).iterdir():
        old_new = changes.get(path.stem, ("", ""))
        if old_new is not None:
            (tmp_path / path.name).write_text(path.read_text().replace(*old_new))
    return tmp_path


def same_links(found, shipped):
    pairs = [(a, b) for a in range(found.ranks) for b in range(a)]
    assert found.ranks == shipped.ranks
    assert [found.link(*p) for p in pairs] == [shipped.link(*p) for p in pairs]


def test_an_hgx_server_is_the_shipped_topology_with_its_ports():
    found = detected("hgx-h200")
    same_links(found, load_topology("hgx-h200"))
    assert (found.target.name, found.warnings, found.islands()) == ("h200", (), (tuple(range(8)),))
    assert found.fabric("nvlink").multicast
    assert found.fabric("pcie").full_gbs == 63.0
    assert found.fabric("network").full_gbs == 50.0


def test_two_of_them_are_the_shipped_pair():
    same_links(detected("hgx-h200", hosts=2), load_topology("hgx-h200-x2"))


def test_links_that_are_down_on_one_device_are_named_and_slow_it_down():
    found = detected("hgx-h200-links-down")
    assert found.degraded() == (5,)
    assert found.bandwidth_gbs(0, 5) == 16 * 25.0
    assert found.bandwidth_gbs(0, 4) == 18 * 25.0
    assert "ranks 5): 16 of 18 nvlink paths are up, 400 of 450 GB/s" in found.warnings[0]
    assert "7 of 8 ranks at full rate: add 5 to missing_ranks" in found.warnings[1]


def test_a_tray_is_four_devices_and_18_of_them_the_shipped_rack():
    tray = detected("gb300-tray")
    assert (tray.ranks, tray.target.name, tray.bandwidth_gbs(0, 3)) == (4, "gb300", 900.0)
    rack = detected("gb300-tray", hosts=18)
    same_links(rack, load_topology("gb300-nvl72"))
    assert rack.fabric("network").full_gbs == 100.0


def test_two_bridged_islands_are_a_mesh_each_with_pcie_between():
    found = detected("h200-nvl-islands")
    assert found.islands() == ((0, 1, 2, 3), (4, 5, 6, 7))
    # Six links of 25 GB/s to each of three peers.
    assert found.bandwidth_gbs(0, 3) == 150.0
    assert (found.link(0, 4).kind, found.bandwidth_gbs(0, 4)) == ("pcie", 63.0)
    assert not found.fabric("nvlink").multicast


def test_a_server_without_bridges_has_pcie_only():
    found = detected("h200-pcie-only")
    assert {fabric.name for fabric in found.fabrics} == {"pcie"}
    assert found.islands() == (tuple(range(8)),)


@pytest.mark.parametrize("name", ["mi355x-rocm-smi", "mi355x-amd-smi"])
def test_eight_mi355x_are_a_mesh_by_either_tool(name):
    found = detected(name)
    assert (found.target.name, found.ranks) == ("mi355x", 8)
    assert found.bandwidth_gbs(2, 7) == pytest.approx(76.8)
    assert found.bisection_gbs() == pytest.approx(load_topology("mi355x-8").bisection_gbs())


def test_the_text_is_the_same_each_time_and_without_nvlink_status_too(tmp_path):
    assert detect(MACHINES / "hgx-h200") == detect(MACHINES / "hgx-h200")
    folder = edited(tmp_path, "hgx-h200", nvlink=None)
    same_links(parse(detect(folder)), load_topology("hgx-h200"))


def test_a_machine_without_tools_is_an_environment_fault(monkeypatch):
    monkeypatch.setattr(detect_module.shutil, "which", lambda name: None)
    with pytest.raises(DeviceFault, match=r"no device found.*nvidia-smi.*--from"):
        detect()


def test_a_tool_that_fails_is_quoted(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVML: Driver/library version mismatch' >&2\nexit 18\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DeviceFault, match="exits with 18: NVML: Driver/library version mismatch"):
        detect()


def test_the_tools_of_a_machine_are_run_and_read(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    dumps = MACHINES / "hgx-h200"
    tool.write_text(
        f'#!/bin/sh\ncase "$1" in topo) cat {dumps}/topo.txt;; nvlink) cat {dumps}/nvlink.txt;;'
        f" *) cat {dumps}/gpus.txt;; esac\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    port = tmp_path / "ib/mlx5_0/ports/1"
    port.mkdir(parents=True)
    for name, text in (
        ("link_layer", "Ethernet\n"),
        ("rate", "200 Gb/sec (4X HDR)\n"),
        ("state", "4: ACTIVE\n"),
    ):
        (port / name).write_text(text)
    monkeypatch.setattr(detect_module, "SYSFS", tmp_path / "ib")
    found = parse(detect())
    same_links(found, load_topology("hgx-h200"))
    # One port of 25 GB/s is shared by eight devices.
    network = found.fabric("network")
    assert (network.kind, network.full_gbs) == ("ethernet", 3.1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpus": ("NVIDIA H200", "NVIDIA A100")}, "found 'NVIDIA A100', expected one of b200"),
        ({"gpus": ("3, NVIDIA H200", "3, NVIDIA B200")}, "NVIDIA B200 and NVIDIA H200, expected"),
        ({"gpus": ("3, NVIDIA H200, 5, 16", "")}, "found '4, NVIDIA H200, 5, 16', expected 3"),
        ({"topo": ("GPU7\tNV18", "gone\tNV18")}, "found rows of 7 GPUs, expected 8"),
        ({"nvlink": ("GPU 7:", "GPU 9:")}, r"found a link of GPU 9, expected 0\.\.7"),
        ({"gpus": None}, "topo.txt and gpus.txt is not there"),
    ],
)
def test_dumps_that_do_not_fit_are_refused_with_both_values(tmp_path, changes, words):
    with pytest.raises((ConfigError, DeviceFault), match=words):
        detect(edited(tmp_path, "hgx-h200", **changes))


def test_hosts_without_a_port_and_partial_meshes_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="2 hosts and no network port found"):
        detect(MACHINES / "h200-nvl-islands", hosts=2)
    # A ring of bridges: neighbours are joined, devices 0 and 2 are not.
    folder = edited(tmp_path, "h200-nvl-islands", nvlink=None)
    text = (folder / "topo.txt").read_text().split("\n")
    rows = [line.split("\t") for line in text]
    rows[1][3] = rows[3][1] = "SYS"
    (folder / "topo.txt").write_text("\n".join("\t".join(row) for row in rows))
    with pytest.raises(ConfigError, match="devices 0 and 2 of 4 are joined over others only"):
        detect(folder)
