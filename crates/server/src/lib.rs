//! Placeholder page, written with the crate.
