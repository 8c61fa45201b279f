//! The rules of Steadfast: plain functions from data to data.
//!
//! Nothing here reads a clock, a file, a socket or a random number: `now`, tokens and jitter arrive as
//! arguments, and `clippy.toml` beside the manifest closes the doors. Every change of the system is a
//! [`command::Command`]; [`command::decide`] judges it against a [`snapshot::Snapshot`] of the rows it names
//! and leaves the difference to be saved in that snapshot. Stores load and save; they decide nothing.
//!
//! The modules stand in the order in which a request meets them.

pub mod limits;
pub mod text;

pub mod json;

pub mod fingerprint;
pub mod options;
pub mod retry;

pub mod event;
pub mod state;

pub mod head;
pub mod snapshot;

pub mod command;

pub mod admission;
pub mod claim;
pub mod commit;
pub mod control;
pub mod heartbeat;
pub mod signal;
pub mod sweep;

pub mod verify;
pub mod why;
