"""Deadlines, packing and tables, without a GPU: python3 -m unittest discover scripts/gpu_check"""
import json
import pathlib
import sys
import tarfile
import tempfile
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import clocks
import correct
import memory
import plan
import rows
import shapes
import speed
from runner import Failed, OutOfTime, Runner, json_lines


class Calls(unittest.TestCase):
    def test_the_parts_of_a_call_fit_into_it(self):
        for call in plan.CALLS:
            secs = sum(part.secs for part in plan.PARTS.values() if part.call == call)
            self.assertLessEqual(secs, plan.CALL_SECS, call)

    def test_our_step_comes_by_minute_three(self):
        names = plan.chosen(["first"])
        before = names[:names.index("step") + 1]
        self.assertLess(sum(plan.PARTS[name].secs for name in before), 180)

    def test_words_are_calls_and_parts(self):
        self.assertEqual(plan.chosen([]), list(plan.PARTS))
        self.assertEqual(plan.chosen(["full", "preflight"]), ["preflight", "full"])
        self.assertNotIn("full", plan.chosen(["first"]))


class Runs(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.path = pathlib.Path(self.folder.name)

    def runner(self, budget=60.0):
        bundle = self.path / "bundle"
        bundle.mkdir()
        says = self.path / "says"
        says.write_text("#!/bin/sh\necho '{\"said\": \"'$1'\"}'\n")
        says.chmod(0o755)
        with tarfile.open(bundle / "programs.tar.xz", "w:xz") as packed:
            packed.add(says, "./says")
        work = self.path / "work"
        work.mkdir()
        return Runner(False, work, budget, bundle)

    def test_programs_are_unpacked_when_asked_for_and_logs_packed(self):
        run = self.runner()
        self.assertEqual(json_lines(run.ours("a word", "says", ["yes"], 20)), [{"said": "yes"}])
        with self.assertRaisesRegex(Failed, "other is not in .*programs.tar.xz"):
            run.program("other")
        run.pack_logs(self.path / "logs.tar.xz")
        with tarfile.open(self.path / "logs.tar.xz") as packed:
            self.assertIn("logs/a-word.log", packed.getnames())

    def test_a_command_ends_at_its_deadline_with_all_it_started(self):
        run = self.runner()
        marker = self.path / "still here"
        began = time.monotonic()
        with self.assertRaisesRegex(Failed, "not finished within 5 s"):
            run.run("sleep", ["sh", "-c", f"(sleep 7; touch '{marker}') & wait"], 5)
        self.assertLess(time.monotonic() - began, 7)
        time.sleep(max(0, 8 - (time.monotonic() - began)))
        self.assertFalse(marker.exists())

    def test_nothing_starts_when_the_call_is_over(self):
        run = self.runner(budget=0)
        with self.assertRaises(OutOfTime):
            run.run("anything", ["true"], 60)
        row = plan.run_part(run, "operations")
        self.assertTrue(row["result"].startswith("SKIPPED"), row)

    def test_a_failure_says_what_was_said_last(self):
        with self.assertRaisesRegex(Failed, "exit code 3: no luck"):
            self.runner().run("fails", ["sh", "-c", "echo no luck; exit 3"], 20)


class Places(unittest.TestCase):
    """Of the optimizer's state."""

    def runs(self):
        line = {"losses": [5.0, None, 4.5], "grad_norms": [1.0, None, 0.5], "loss_scale": 1024.0, "skipped_steps": 1,
                "peak_device_bytes": 100, "step_secs": 1.0}
        smaller = line | {"peak_device_bytes": 40, "step_secs": 2.0}
        return {(case, place): dict(line if place == "GPU" else smaller)
                for case in memory.CASES for place in ("GPU", "host", "files")}

    def test_the_same_bits_in_less_memory_pass(self):
        row = memory.compared_places(self.runs())
        self.assertEqual((row["value"], row["reached"]), (0.4, True))
        self.assertIn("12 runs, the same losses and norms to the bit, 1 of 3 steps of f16 skipped", row["result"])
        json.dumps(row)

    def test_one_other_bit_fails(self):
        for place, field, value in [("host", "losses", [5.0, None, 4.500000000000001]), ("files", "grad_norms", [1.0, 0.7, 0.5]),
                                    ("host", "loss_scale", 512.0), ("files", "skipped_steps", 2)]:
            runs = self.runs()
            runs["bf16", place][field] = value
            with self.assertRaisesRegex(Failed, f"bf16, state in {place}: {field}"):
                memory.compared_places(runs)

    def test_f16_must_overflow_and_recover(self):
        for skipped in (0, 3):
            runs = {key: line | {"skipped_steps": skipped} for key, line in self.runs().items()}
            with self.assertRaisesRegex(Failed, f"f16 skipped {skipped} of 3 steps"):
                memory.compared_places(runs)

    def test_more_memory_with_offload_misses_the_goal(self):
        runs = self.runs()
        runs["f32", "files"]["peak_device_bytes"] = 100
        self.assertFalse(memory.compared_places(runs)["reached"])


class Counts(unittest.TestCase):
    """Of the GPU beside the meters'."""

    def lines(self, device_bytes):
        return {"f32": [{"zero": zero, "recompute": "none", "kept_by_replicas": kept, "device_bytes": device}
                        for (zero, kept), device in zip([(0, 1600), (3, 400)], device_bytes)]}

    def test_the_worst_ratio_counts(self):
        row = memory.compared_counts(self.lines([1616, 440]))
        self.assertAlmostEqual(row["value"], 1.1)
        self.assertFalse(row["reached"])
        self.assertIn("(f32 ZeRO-3 none); ZeRO-3 over ZeRO-0: 0.27 in f32", row["result"])
        self.assertTrue(memory.compared_counts(self.lines([1616, 404]))["reached"])

    def test_meters_that_count_what_is_not_there_fail(self):
        with self.assertRaisesRegex(Failed, "less than the meters count: f32 ZeRO-3 none 0.975"):
            memory.compared_counts(self.lines([1616, 390]))


class Memory(unittest.TestCase):
    """Our measurement where the whole batch is too much."""

    class Run:
        smoke, tried = True, []

        def ours(self, what, name, arguments, deadline, variables):
            size = int(arguments[-1])
            self.tried.append(size)
            if size > 2:
                raise Failed("CUDA_ERROR_OUT_OF_MEMORY")
            return json.dumps({"micro_batch_size": size, "attention": "own"})

    def test_smaller_micro_batches_are_taken(self):
        line = shapes.ours(self.Run(), "full", [], 8, 60)
        self.assertEqual((line["micro_batch_size"], line["out_of_memory_with"]), (2, [8, 4]))


class Comparisons(unittest.TestCase):
    def steps(self, **changed):
        same = {"losses": [11.0, 10.0, 9.0], "grad_norms": [2.0, 1.5, 1.0]}
        names = ("torch_f32", "ours_f32", "torch_bf16", "ours_bf16")
        return {name.replace("_", " "): {**same, **changed.get(name, {})} for name in names}

    def test_equal_steps_pass(self):
        self.assertIn("within 0.0e+00", correct.compared_steps(self.steps())["result"])

    def test_another_loss_in_f32_or_norm_in_bf16_fails(self):
        for changed in ({"ours_f32": {"losses": [11.0, 10.0, 9.01]}}, {"ours_bf16": {"grad_norms": [2.1, 1.5, 1.0]}}):
            with self.assertRaises(Failed):
                correct.compared_steps(self.steps(**changed))

    def test_bf16_may_be_as_far_off_as_pytorch(self):
        off = {"grad_norms": [2.02, 1.5, 1.0]}
        correct.compared_steps(self.steps(ours_bf16=off, torch_bf16=off))

    def test_pytorch_s_best_is_what_counts(self):
        ours = {"tokens_per_sec": 110.0, "mfu": 0.6, "profile": []}
        theirs = {"micro_batch_size": 4, "attention": ["flash_attention"]}
        row = speed.compared({"ours": ours, "eager": {**theirs, "tokens_per_sec": 90.0},
                              "compiled": {**theirs, "tokens_per_sec": 100.0}}, {}, 1.1, mfu_goal=0.5)
        self.assertAlmostEqual(row["value"], 1.1)
        self.assertTrue(row["reached"])
        self.assertIn("compiled, micro-batch 4, flash_attention", row["result"])
        self.assertFalse(speed.compared({"ours": ours}, {"eager": "out of memory"}, 1.1)["reached"])


class Tables(unittest.TestCase):
    def report(self, path, gpu, began, smoke=False):
        run = {"tokens_per_sec": 61234.5, "mfu": 0.523, "peak_device_bytes": 64 * 2**30}
        part = {"runs": {"ours": run}, "value": 1.234, "memory": 0.9, "result": ""}
        path.write_text(json.dumps({"gpu": gpu, "began": began, "smoke": smoke, "parts": {"full": part}}))
        return path

    def test_cells_are_of_the_gpu_that_ran(self):
        with tempfile.TemporaryDirectory() as folder:
            first = self.report(pathlib.Path(folder) / "first.json", "NVIDIA H100 80GB HBM3", "2026-01-01")
            smoke = self.report(pathlib.Path(folder) / "smoke.json", "NVIDIA H200", "2026-01-02", smoke=True)
            lines = rows.table(rows.merged([first, smoke])).splitlines()
        self.assertEqual(len(lines), 2 + len(rows.ROWS))
        cells = [cell.strip() for cell in lines[2].split("|")]
        self.assertEqual(cells[3:5], ["61,234 tokens/s, 1.23 of PyTorch, MFU 52.3%", "open"])
        self.assertIn("| 64.0 GiB, 0.90 of PyTorch's | open |", lines[3])

    def test_results_md_has_the_same_rows(self):
        text = (pathlib.Path(__file__).parents[2] / "docs/gpu/RESULTS.md").read_text()
        for case, goal, _ in rows.ROWS:
            self.assertIn(f"| {case} | {goal} |", text)

    def test_clocks_are_those_of_a_busy_gpu(self):
        found = clocks.summary(["345, 2619, 70.1, 30, 0x1\n", "1980, 2619, 650.0, 60, 0x0\n", "1755, 2619, 690.0, 61, 0x4\n", "[N/A]\n"])
        self.assertEqual((found["samples"], found["min_sm_mhz"], found["max_watts"]), (2, 1755, 690))
        self.assertIsNone(clocks.summary([]))


if __name__ == "__main__":
    unittest.main()
