//! Weights that are missing, damaged or not those that the configuration describes.

use std::fs;

use safetensors::Dtype;

use super::folder::{Tensors, edit_json};
use super::workspace::{NO_WEIGHTS, Workspace, refuses_file, refuses_model};

const NORM: &str = "model.layers.1.input_layernorm.weight";

#[track_caller]
fn refuses_tensors(edit: impl FnOnce(&mut Tensors), parts: &[&str]) {
    refuses_model(|workspace| workspace.edit_weights(edit), parts);
}

#[test]
fn files_that_are_missing_or_damaged_are_named() {
    let file = "model/model.safetensors";
    refuses_file(file, |path| fs::remove_file(path).unwrap(), &[NO_WEIGHTS]);
    let truncate = |len: u64| {
        move |path: &std::path::Path| {
            fs::File::options()
                .write(true)
                .open(path)
                .unwrap()
                .set_len(len)
                .unwrap();
        }
    };
    for len in [0, 5, 100, 218_000] {
        let parts = [
            "model.safetensors",
            &format!("({len} bytes)"),
            "truncated or corrupt",
        ];
        refuses_file(file, truncate(len), &parts);
    }
    let overwrite = |start: usize, bytes: &'static [u8]| {
        move |path: &std::path::Path| {
            let mut content = fs::read(path).unwrap();
            content[start..start + bytes.len()].copy_from_slice(bytes);
            fs::write(path, content).unwrap();
        }
    };
    let parts = ["model.safetensors", "not a complete safetensors file"];
    refuses_file(file, overwrite(0, &[0xff; 8]), &parts);
    refuses_file(file, overwrite(8, b"garbage!"), &parts);
}

#[test]
fn a_tensor_that_is_missing_misshapen_or_of_a_foreign_type_is_named() {
    refuses_tensors(
        |tensors| drop(tensors.remove(NORM)),
        &[NORM, "is missing from the checkpoint", "hint: it does have"],
    );
    refuses_tensors(
        |tensors| {
            let norm = tensors.get_mut(NORM).unwrap();
            norm.1 = vec![16];
            norm.2.truncate(64);
        },
        &[NORM, "[16]", "expected [32]"],
    );
    refuses_tensors(
        |tensors| *tensors.get_mut(NORM).unwrap() = (Dtype::I64, vec![32], vec![0; 256]),
        &[NORM, "I64"],
    );
}

#[test]
fn a_tensor_that_the_configuration_does_not_mention_is_named() {
    let bias = "model.layers.0.self_attn.q_proj.bias";
    refuses_tensors(
        |tensors| drop(tensors.insert(bias.to_string(), (Dtype::F32, vec![32], vec![0; 128]))),
        &[
            bias,
            "1 tensors that the configured model does not use",
            "config.json",
        ],
    );
}

#[test]
fn an_index_that_is_damaged_or_names_what_is_not_there_is_an_error() {
    let refuses = |spoil: &dyn Fn(&Workspace), parts: &[&str]| {
        let workspace = Workspace::with_model("bf16_sharded");
        spoil(&workspace);
        workspace.refuses(&workspace.finetune(), parts);
    };
    let third = "model-00003-of-00005.safetensors";
    let index = "model.safetensors.index.json";
    refuses(
        &|workspace| fs::remove_file(workspace.model(third)).unwrap(),
        &[index, third, "does not exist"],
    );
    refuses(
        &|workspace| {
            edit_json(&workspace.model(index), |index| {
                index["weight_map"]["lm_head.weight"] = "elsewhere.safetensors".into();
            });
        },
        &[index, "elsewhere.safetensors", "does not exist"],
    );
    refuses(
        &|workspace| {
            edit_json(&workspace.model(index), |index| {
                index["weight_map"]["model.norm.weight"] = "../text.txt".into();
            });
        },
        &[index, "../text.txt", "plain file names"],
    );
    refuses(
        &|workspace| fs::write(workspace.model(index), "{}").unwrap(),
        &[index, "not a safetensors index"],
    );
}
