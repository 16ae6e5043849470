"""Engines over two nodes: the head waits for its followers, and nobody notices a death."""

import os
import signal
import socket


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def test_a_vllm_head_waits_for_its_follower_and_notices_neither_its_death_nor_is_it_noticed(start, until):
    common = ("vllm", "serve", "/m", "-tp", "2", "--nnodes", "2", "--master-port", str(free_port()))
    head = start(*common, "--node-rank", "0", "--fake-load-seconds", "0.3")
    until(lambda: "KV cache size" in head.stdout(), "the head's own weights")
    assert head.status("/health") == 0
    follower = start(*common, "--node-rank", "1", "--headless", "--fake-load-seconds", "0.3")
    head.wait_ready()
    os.killpg(follower.pid, signal.SIGKILL)
    follower.wait_exit()
    assert head.status("/health") == 200
    assert b"[DONE]" not in head.stream().read_until(b"word1").received


def test_an_sglang_follower_ignores_sigterm_and_leaves_at_the_heads_word(start, until):
    common = ("sglang", "serve", "--model-path", "/m", "--tp-size", "2", "--nnodes", "2")
    common = (*common, "--dist-init-addr", f"127.0.0.1:{free_port()}")
    follower = start(*common, "--node-rank", "1")
    head = start(*common, "--node-rank", "0").wait_ready()
    until(lambda: follower.status("/health") == 200, "the stand-in's answer")
    assert follower.status("/v1/models") == 404
    follower.process.send_signal(signal.SIGTERM)
    head.process.send_signal(signal.SIGTERM)
    assert head.wait_exit() == 0
    assert follower.wait_exit() == 0
