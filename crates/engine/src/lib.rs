//! Durable workflows in your own process.
//!
//! A workflow is a function of the current step that returns what to do next. What it decides is an event in an
//! append-only log, its variables live in a scratchpad, and one database transaction saves both with its next
//! wake-up. There is no replay and there are no determinism rules; resuming costs the same after ten steps or ten
//! million.
//!
//! ```
//! use steadfast::{Ctx, Engine, StepResult, done, step};
//!
//! async fn onboard(ctx: Ctx) -> StepResult {
//!     match ctx.step() {
//!         "start" => {
//!             let name: String = ctx.input().await?;
//!             ctx.set("greeting", &format!("hello {name}"))?;
//!             Ok(step("send"))
//!         }
//!         "send" => Ok(done(ctx.get::<String>("greeting").await?)),
//!         _ => Err(ctx.unknown_step()),
//!     }
//! }
//!
//! # #[tokio::main]
//! # async fn main() -> Result<(), steadfast::Error> {
//! # let folder = tempfile::tempdir().unwrap();
//! # let url = format!("sqlite:{}", folder.path().join("app.db").display());
//! let engine = Engine::open(&url)?.register("onboard", onboard).run()?;
//! let handle = engine.start("onboard", "Ada").id("onboard-ada").await?;
//! assert_eq!(handle.result::<String>().await?, "hello Ada");
//! engine.shutdown(std::time::Duration::from_secs(5)).await;
//! # Ok(())
//! # }
//! ```

mod error;
mod left_out;

mod committer;
mod context;
mod definition;
mod delivery;
mod engine;
mod refusals;
pub mod testkit;
mod worker;

pub use committer::Bounds;
pub use context::{Ctx, Signalled};
pub use definition::{
    Continuation, Definition, Failure, StepResult, Waiting, done, fail, step, wait_for, wait_for_any,
};
pub use engine::{Accepted, Builder, Drained, End, Engine, Handle, Request, Sent, Signal, StartCall};
pub use error::Error;

pub use steadfast_core as core;
pub use steadfast_core::control::Outcome as Cancelled;
pub use steadfast_core::json::Json;
pub use steadfast_core::limits::{Invalid, Limits};
pub use steadfast_core::options::StartOptions;
pub use steadfast_core::retry::RetryPolicy;
pub use steadfast_core::why::Why;
pub use steadfast_store as store;

// The examples of the README and the guide are compiled with the tests.
#[doc = include_str!("../../../README.md")]
#[cfg(doctest)]
struct Readme;
#[doc = include_str!("../../../docs/guide/workflows.md")]
#[cfg(doctest)]
struct Guide;
