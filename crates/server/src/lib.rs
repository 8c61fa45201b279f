//! Steadfast over HTTP: JSON under `/v1`, health and metrics beside it.
//!
//! The server translates and decides nothing: a request becomes a call of the [`Engine`](steadfast::Engine), and its
//! answer or its error becomes one of ours. A caller is told three things apart: done, refused (nothing was
//! written), and unknown (repeat with the same id). Every error is a [`problem`] document.
//!
//! # A request's way
//! ```text
//! accept ─► connection ─► gate ─► route: body ─► decode ─► engine ─► wire
//!   │           │          │               │        │
//!   full: 503   slow: cut  421 403 415     413 408  400
//! ```
//!
//! # What a client cannot do
//! Keep a connection open by silence, by half a header, by a body that does not come, or by not reading its answer;
//! make us hold more than the bounds in [`Options`]; reach us through a web page in somebody's browser. Each bound is
//! a field there, with its reason.

mod options;
mod server;

mod connection;
mod gate;

mod body;
mod decode;
mod params;
pub mod problem;
mod wire;

mod admission;
mod bulk;
mod control;
mod look;
mod outcome;
mod signals;

mod health;
mod telemetry;

pub use options::Options;
pub use server::{ServeError, Server, may_listen};
