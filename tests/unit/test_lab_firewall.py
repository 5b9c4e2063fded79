from lab.firewall import undo

# iptables-save 1.8.9 after dockerd 20.10.24 had ended, 2026-11-30; one rule of someone else's added.
AFTER = """\
*filter
:INPUT ACCEPT [0:0]
:FORWARD DROP [0:0]
:DOCKER - [0:0]
:DOCKER-USER - [0:0]
-A FORWARD -j DOCKER-USER
-A FORWARD -i tun0 -j ACCEPT
-A DOCKER-USER -j RETURN
COMMIT
*nat
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:DOCKER - [0:0]
-A OUTPUT ! -d 127.0.0.0/8 -m addrtype --dst-type LOCAL -j DOCKER
COMMIT
"""


def test_undo_removes_what_docker_added_and_nothing_else() -> None:
    assert undo("", AFTER) == [
        ["-t", "filter", "-D", "FORWARD", "-j", "DOCKER-USER"],
        ["-t", "filter", "-F", "DOCKER"],
        ["-t", "filter", "-F", "DOCKER-USER"],
        ["-t", "filter", "-X", "DOCKER"],
        ["-t", "filter", "-X", "DOCKER-USER"],
        ["-t", "filter", "-P", "FORWARD", "ACCEPT"],
        [
            *[
                "-t",
                "nat",
                "-D",
                "OUTPUT",
                "!",
                "-d",
                "127.0.0.0/8",
                "-m",
                "addrtype",
                "--dst-type",
                "LOCAL",
                "-j",
                "DOCKER",
            ]
        ],
        ["-t", "nat", "-F", "DOCKER"],
        ["-t", "nat", "-X", "DOCKER"],
    ]


def test_chains_that_were_there_before_stay() -> None:
    assert undo(AFTER, AFTER) == []


def test_a_policy_goes_back_to_what_it_was() -> None:
    before = "*filter\n:FORWARD DROP [0:0]\nCOMMIT\n"
    assert not [command for command in undo(before, AFTER) if "-P" in command]
