//! Each way of multiplying. The environment decides for a whole process, so each case is one: this program again.

use candle_ops::ProductChoice;
use std::process::Command;

/// What tests of this program say with the environment variable set to this, and whether they pass.
fn run(choice: &str, tests: &[&str]) -> (bool, String) {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(tests)
        .env("CANDLE_TRAIN_PRODUCTS", choice)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(!said.contains("running 0 tests"), "{said}");
    (output.status.success(), said)
}

#[test]
fn products_are_right_in_each_way() {
    let possible = ProductChoice::ALL.into_iter();
    for choice in possible.filter(|choice| choice.is_possible()) {
        let tests = ["linear::", "attention::matches", "attention::heads"];
        let (passed, said) = run(&choice.to_string(), &tests);
        assert!(passed, "{choice}: {said}");
    }
}

#[test]
fn a_way_that_there_is_not_is_an_error_of_the_first_operation() {
    let (passed, said) = run("4", &["linear::matches_the_reference"]);
    let error = "CANDLE_TRAIN_PRODUCTS: expected fma, dots, 2 or 3, got `4`\nhint: ";
    assert!(!passed && said.contains(error), "{said}");
}
