//! The `steadfast` command.
fn main() {}
