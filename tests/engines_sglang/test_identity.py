"""Keys of SGLang's pages depend on everything that affects KV: SGLang's arguments, its configurations and its
requests."""

from __future__ import annotations

from tests.engines_sglang.conftest import Parts


def test_every_argument_of_the_installed_sglang_is_in_one_list(parts: Parts) -> None:
    found = parts["identity_child"]["lists"]
    assert not found["missing"], (
        "new in SGLang: put them into adapters/sglang/identity_fields.py, or docs/identity.md"
    )
    assert (found["gone"], found["twice"]) == ([], [])
    assert parts["identity_child"]["control: a made-up argument"]["missing"] == ["made_up"]


def test_taken_arguments_change_the_keys_and_left_out_ones_do_not(parts: Parts) -> None:
    assert parts["identity_child"]["arguments"] == {"taken in vain": [], "left out in vain": []}
    control = parts["identity_child"]["control: other arguments"]
    assert control == {"taken in vain": ["model_impl"], "left out in vain": ["port"]}


def test_files_quantisation_and_version_are_in_the_keys(parts: Parts) -> None:
    assert parts["identity_child"]["keys"] == {"apart": 7, "as usual": ["remote code"]}


def test_the_heads_and_layers_that_a_rank_holds_are_in_the_keys(parts: Parts) -> None:
    """Keys depend on the heads and layers in a rank's pages. With two KV heads and four ranks, the second rank holds
    the first head. With data parallelism of the attention over two groups of two ranks, it holds the second head. Under
    different partitions, the second pipeline stage may have the same number of layers, but not the same layers.
    """
    found = parts["identity_child"]["places"]
    assert found["heads"] == {
        "four ranks": "dp0.pp0of1.tp1of4",
        "two heads per replica": "dp0.pp0of1.tp1of4.attn1of2",
    }
    assert found["layers"] == {
        "8,12,12": "dp0.pp1of3.from8.tp0of1",
        "10,12,10": "dp0.pp1of3.from10.tp0of1",
        "": "dp0.pp1of3.tp0of1",
        # A control: SGLang ignores the partition if there is one stage.
        "one stage, 8,12,12": "dp0.pp0of1.tp0of1",
        "one stage, 10,12,10": "dp0.pp0of1.tp0of1",
        "one stage, ": "dp0.pp0of1.tp0of1",
    }


def test_decode_context_parallelism_is_refused(parts: Parts) -> None:
    """flexkv refuses decode context parallelism. With it, a page of SGLang's tree spans several ranks, and each rank's
    pool holds only some of its tokens. flexkv would store and load wrong addresses of the pool.
    """
    assert "decode context parallelism of 2" in parts["identity_child"]["places"]["refused"]


def test_weights_and_files_that_an_argument_names_count_by_content(parts: Parts) -> None:
    names = ["kt_weight_path", "modelopt_checkpoint_restore_path", "uno_lora_path"]
    assert parts["identity_child"]["weights"] == {
        "apart": names,
        "copies are the same": names,
        "read whole": names,
        "algorithm apart": 3,
        "control: paths without": [],
        "control: the model's": 1,
    }


def test_environment_variables_that_change_kv_are_in_the_keys(parts: Parts) -> None:
    # The last variable in the child's list, SGLANG_LOG_MS, is a control: it does not change KV.
    found = {"in vain": ["SGLANG_LOG_MS"], "apart by default": []}
    assert parts["identity_child"]["environment"] == found


def test_weights_that_do_not_come_from_the_files_have_keys_of_one_run(parts: Parts) -> None:
    """If an engine gets its weights from another source than its files, its keys are valid for one run only. The files
    may have changed since another process or an earlier run read them."""
    apart = ["remote_instance", "presharded", "ipc_cache", "client", "daemon"]
    # A control: an engine that reads the files itself has the same keys in each run.
    assert parts["identity_child"]["other process"] == {"apart": apart, "apart, with identity.model": []}


def test_which_files_a_loader_reads_is_in_the_keys_and_its_speed_is_not(parts: Parts) -> None:
    assert parts["identity_child"]["loader"] == {
        "formats": ["auto", "safetensors", "fastsafetensors", "runai_streamer"],
        "speed": True,
        "control: a path": False,
    }


def test_attention_backends_are_in_the_keys_of_quantised_kv(parts: Parts) -> None:
    """Keys depend on the attention backend if KV is quantised, because some backends then quantise the queries, too.
    With other KV, backends differ only in the order of summation, and have the same keys."""
    assert parts["identity_child"]["attention"] == {
        "torch.float8_e4m3fn": 3,
        "torch.uint8, fp8_e4m3": 3,
        "torch.bfloat16": 1,
    }


def test_the_whole_configuration_counts_where_the_model_takes_images(parts: Parts) -> None:
    assert parts["identity_child"]["vision"] == {
        "takes images": [True, False, True, False],
        "images apart": True,
        "text is the same": True,
    }


def test_pages_of_an_image_are_found_in_their_run_alone(parts: Parts) -> None:
    """Pages of a prompt with an image are hits only in the run that stored them. SGLang identifies an image by 64 bits,
    which may collide. Without flexkv's hook, two images with equal digests share all pages.
    """
    assert parts["input_child"]["control: without the watch"]["shared"] == 3
    assert parts["input_child"]["images"] == {
        "text as before": True,
        "pages of two runs": 0,
        "pages of one run": 3,
        "queued again": 3,
        "with text": 0,
        "salted": 0,
        "another extra key": 0,
    }
    assert parts["input_child"]["prefetched"]["named"]


def test_an_adapters_id_sent_as_extra_key_gets_no_pages_of_the_adapter(parts: Parts) -> None:
    """A client that sends an adapter's id as extra key gets no pages of the adapter. SGLang's page hashes contain an
    adapter only by its id in the extra key. Without flexkv's hook, such a client would share all pages with requests
    that use the adapter.
    """
    assert parts["input_child"]["control: an id without the watch"]["shared"] == 2
    assert parts["input_child"]["an adapter's id as extra key"] == {
        "adapter as before": True,
        "with the adapter": 0,
        "queued again": 2,
        "in longer text": 0,
    }


def test_an_sglang_without_a_hook_is_refused(parts: Parts) -> None:
    found = parts["input_child"]["refused"]
    assert "Scheduler._add_request_to_queue_gone, or another plugin" in found["no such method"]
    assert "Scheduler._add_request_to_queue, or another plugin" in found["hooked by another"]


def test_requests_that_bring_embeddings_share_nothing(parts: Parts) -> None:
    assert parts["input_child"]["embeddings"]["apart"] == 5
