//! `--offload`: the same checkpoint, and folders that cannot be used.

use std::fs;

use super::folder::{names, read_checkpoint};
use super::workspace::Workspace;

#[test]
fn the_checkpoint_is_the_same_wherever_the_state_is() {
    let workspace = Workspace::new();
    let dir = workspace.path("state");
    fs::create_dir(&dir).unwrap();
    let file = format!("nvme:{}", dir.display());
    for dtype in ["f32", "bf16"] {
        let saved = |offload: Option<&str>| {
            let program = workspace.finetune().flag("--dtype", dtype);
            match offload {
                None => program.succeeds(),
                Some(place) => program.flag("--offload", place).succeeds(),
            };
            read_checkpoint(&workspace.output())
        };
        let want = saved(None);
        for place in ["optimizer", &file] {
            assert!(saved(Some(place)) == want, "{dtype} {place}");
        }
    }
    assert!(names(&dir).is_empty(), "{:?}", names(&dir));
}

#[test]
fn a_folder_that_cannot_hold_the_state_is_refused_before_the_first_step() {
    let workspace = Workspace::new();
    let program = |dir: &str| {
        let place = format!("nvme:{}", workspace.path(dir).display());
        workspace.finetune().flag("--offload", place)
    };
    let refuses = |program: &super::program::Program, why: &str| {
        let outcome = program.run();
        let parts = [
            "cannot keep",
            "bytes of this rank's optimizer state",
            why,
            "hint:",
        ];
        outcome.assert_error(&parts);
        assert!(!outcome.stderr.contains("loss"), "{}", outcome.stderr);
    };
    refuses(&program("missing"), "missing");
    refuses(&program("text.txt"), "text.txt");
    let small = program(".").flag("--tp", 1).flag("--dp", 1);
    refuses(&small.with_limited_files(), "File too large");
}
