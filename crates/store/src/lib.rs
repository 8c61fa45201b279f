//! What Steadfast remembers.
//!
//! A store loads rows by key or by due time and saves a difference; it decides nothing. [`Store`] is the contract,
//! [`sqlite`] keeps it in one file, [`memory`] keeps it in memory and [`faults`] makes any of them fail on demand.
//! [`conformance`] is the suite that every store passes.

pub mod clock;
mod contract;
pub mod faults;
pub mod memory;
pub mod postgres;
pub mod seldom;
pub mod sqlite;
mod stored;

pub mod conformance;

pub use contract::{
    Cursor, Disk, Fate, Filter, Identity, Listed, Logged, OldestSnapshot, Page, Reader, Saved, Store, StoreError,
    Variable, Verified, Writer,
};
