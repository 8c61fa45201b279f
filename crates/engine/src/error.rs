//! Errors: what a caller of the engine can be told, each with a stable code.

use std::sync::Arc;

use steadfast_core::limits::Invalid;
use steadfast_core::state::Status;
use steadfast_core::text::{SignalId, WorkflowId};
use steadfast_store::StoreError;

/// Why a call did not do what was asked.
///
/// [`Error::code`] is stable and the same over HTTP and in every client.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// The input was refused; nothing was written.
    #[error("{0}")]
    Invalid(#[from] Invalid),
    /// The id was used before for another request; nothing was written.
    #[error("workflow {id} was started before with other content; give this request an id of its own")]
    IdentityConflict {
        /// The id.
        id: WorkflowId,
        /// When the other request was accepted, in milliseconds since the epoch.
        admitted_at: i64,
    },
    /// The signal's id was used before for another signal to the same workflow; nothing was written.
    #[error("workflow {id} was sent signal {signal_id} before with other content; give this one an id of its own")]
    SignalConflict {
        /// The workflow.
        id: WorkflowId,
        /// The signal's id.
        signal_id: SignalId,
        /// When the other one was accepted, in milliseconds since the epoch.
        accepted_at: i64,
    },
    /// The workflow has ended and takes no signals; nothing was written.
    #[error("workflow {id} has ended ({status}) and takes no signals", status = .status.label())]
    WorkflowFinished {
        /// The workflow.
        id: WorkflowId,
        /// How it ended.
        status: Status,
    },
    /// The commit of a signal failed in a way that leaves open whether it happened.
    #[error("whether the signal was accepted is not known; send it to {id} again as {signal_id} to learn it")]
    SignalUnknown {
        /// The workflow.
        id: WorkflowId,
        /// The signal's id.
        signal_id: SignalId,
    },
    /// There is no such workflow.
    #[error("there is no workflow {id}")]
    UnknownWorkflow {
        /// The id that was asked for.
        id: WorkflowId,
    },
    /// Too much is waiting; nothing was written.
    #[error("the engine has more requests waiting than it takes; try again in {retry_after_ms} ms")]
    Overloaded {
        /// When to try again.
        retry_after_ms: u64,
    },
    /// The commit failed in a way that leaves open whether it happened. A retry with the same id tells.
    #[error("whether the commit happened is not known; repeat the call with the same id to learn it")]
    OutcomeUnknown {
        /// The id to repeat a start with; `None` where the call names its own.
        id: Option<WorkflowId>,
    },
    /// The store cannot serve now; nothing was written.
    #[error("the store cannot serve now")]
    Store(#[source] Arc<StoreError>),
    /// The engine was shut down.
    #[error("the engine is shut down")]
    Closed,
    /// The awaited workflow failed.
    #[error("the workflow failed with {failure}: {reason}")]
    WorkflowFailed {
        /// Its failure code.
        failure: String,
        /// Its reason.
        reason: String,
    },
    /// The awaited workflow was cancelled.
    #[error("the workflow was cancelled: {reason}")]
    WorkflowCancelled {
        /// The reason given.
        reason: String,
    },
    /// A stored value does not have the form that was asked for.
    #[error("{what} does not have the form that was asked for: {problem}")]
    Value {
        /// Which value.
        what: String,
        /// What does not fit; positions, no contents.
        problem: String,
    },
    /// A rule of ours was broken; nothing was written. Please report it.
    #[error("internal fault, nothing was written: {0}")]
    Internal(String),
}

impl Error {
    /// The stable code.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Invalid(invalid) => invalid.code,
            Self::IdentityConflict { .. } | Self::SignalConflict { .. } => "identity_conflict",
            Self::WorkflowFinished { .. } => "workflow_finished",
            Self::UnknownWorkflow { .. } => "unknown_workflow",
            Self::Overloaded { .. } => "overloaded",
            Self::OutcomeUnknown { .. } | Self::SignalUnknown { .. } => "outcome_unknown",
            Self::Store(error) => error.code(),
            Self::Closed => "shut_down",
            Self::WorkflowFailed { .. } => "workflow_failed",
            Self::WorkflowCancelled { .. } => "workflow_cancelled",
            Self::Value { .. } => "invalid_value",
            Self::Internal(_) => "internal",
        }
    }
}

impl Error {
    /// True when the store cannot be reached now, and the same may work later.
    pub(crate) fn is_outage(&self) -> bool {
        let Self::Store(error) = self else { return false };
        matches!(
            **error,
            StoreError::Recovering
                | StoreError::NoServer { .. }
                | StoreError::Denied { .. }
                | StoreError::Postgres { .. }
        )
    }
}

impl From<StoreError> for Error {
    fn from(error: StoreError) -> Self {
        Self::Store(Arc::new(error))
    }
}
