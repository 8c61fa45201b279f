//! Gate: what is asked of every request before anything is looked at.
//!
//! Any web page in the user's browser can send requests to a loopback address. Three rules keep it out until there are
//! keys: the host must be a loopback name, or a page whose name was made to resolve to 127.0.0.1 could read our
//! answers; the origin must be our own, or a page could start workflows without reading the answer; and a body must be
//! JSON by its type, which no page sends to another origin unless allowed, and we allow none.

use std::net::{Ipv4Addr, Ipv6Addr};

use axum::extract::Request;
use axum::http::header::{self, HeaderName};
use axum::http::{HeaderMap, HeaderValue};
use axum::response::{IntoResponse, Response};

use crate::body;
use crate::problem::Problem;

/// Lets a request in, or says why not.
pub(crate) fn check(request: &Request) -> Result<(), Problem> {
    let headers = request.headers();
    let host = one(headers, &header::HOST).filter(|host| is_loopback(host));
    // A target that names a host of its own counts more than the header.
    let addressed = request.uri().authority().is_none_or(|authority| is_loopback(authority.as_str()));
    let (Some(host), true) = (host, addressed) else {
        let detail = "the header Host must be localhost, an address in 127.0.0.0/8 or [::1]";
        return Err(Problem::new("misdirected_request", detail));
    };
    if headers.contains_key(header::ORIGIN) {
        let own = |origin: &str| origin.strip_prefix("http://").is_some_and(|named| named.eq_ignore_ascii_case(host));
        if !one(headers, &header::ORIGIN).is_some_and(own) {
            let detail = "requests of a web page are taken only if it was served from here";
            return Err(Problem::new("origin_refused", detail));
        }
    }
    if has_body(headers) {
        let wanted = if request.uri().path() == "/v1/workflows/bulk" { "x-ndjson" } else { "json" };
        if !is_application(headers, wanted) {
            let detail = format!("send the body as application/{wanted} in UTF-8, not encoded");
            return Err(Problem::new("unsupported_media_type", detail));
        }
    }
    Ok(())
}

/// Answers a request with a problem after taking what its client is still sending.
pub(crate) async fn refuse(request: Request, problem: Problem) -> Response {
    let (parts, mut body) = request.into_parts();
    body::linger(&parts.headers, &mut body).await;
    problem.into_response()
}

/// The value of a header that stands there exactly once.
fn one<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    let mut values = headers.get_all(name).iter();
    match (values.next(), values.next()) {
        (Some(value), None) => value.to_str().ok(),
        _ => None,
    }
}

/// Whether `host`, which may name a port, is this machine by a name that no DNS server can give away.
fn is_loopback(host: &str) -> bool {
    let (loopback, port) = if let Some(rest) = host.strip_prefix('[') {
        let Some((inner, port)) = rest.split_once(']') else { return false };
        (inner.parse::<Ipv6Addr>().is_ok_and(|address| address == Ipv6Addr::LOCALHOST), port)
    } else {
        let (name, port) = host.split_at(host.find(':').unwrap_or(host.len()));
        let address = name.parse::<Ipv4Addr>();
        (name.eq_ignore_ascii_case("localhost") || address.is_ok_and(|address| address.is_loopback()), port)
    };
    let port_fits = match port.strip_prefix(':') {
        Some(digits) => digits.bytes().all(|byte| byte.is_ascii_digit()) && digits.parse::<u16>().is_ok(),
        None => port.is_empty(),
    };
    loopback && port_fits
}

fn has_body(headers: &HeaderMap) -> bool {
    headers.contains_key(header::TRANSFER_ENCODING)
        || headers.get(header::CONTENT_LENGTH).is_some_and(|length| length != HeaderValue::from_static("0"))
}

fn is_application(headers: &HeaderMap, subtype: &str) -> bool {
    if headers.get(header::CONTENT_ENCODING).is_some_and(|encoding| encoding != "identity") {
        return false;
    }
    let Some(value) = one(headers, &header::CONTENT_TYPE) else { return false };
    let mut parts = value.split(';').map(str::trim);
    let kind = parts.next().and_then(|kind| kind.split_once('/'));
    let right =
        kind.is_some_and(|(top, sub)| top.eq_ignore_ascii_case("application") && sub.eq_ignore_ascii_case(subtype));
    let utf8 = |part: &str| match part.split_once('=') {
        Some((name, value)) if name.trim().eq_ignore_ascii_case("charset") => {
            value.trim().trim_matches('"').eq_ignore_ascii_case("utf-8")
        }
        _ => true,
    };
    right && parts.all(utf8)
}

#[cfg(test)]
mod tests {
    use axum::body::Body;

    use super::*;

    /// `METHOD target | header: value | ..` and what it is answered, in the last column.
    fn verdict(line: &str) -> String {
        let mut parts = line.split('|').map(str::trim);
        let (method, target) = parts.next().unwrap().split_once(' ').unwrap();
        let mut request = Request::builder().method(method).uri(target);
        for part in parts {
            let (name, value) = part.split_once(':').unwrap();
            request = request.header(name.trim(), value.trim());
        }
        let request = request.body(Body::empty()).unwrap();
        match check(&request) {
            Ok(()) => "in".to_owned(),
            Err(problem) => {
                let text = serde_json::to_value(problem.document()).unwrap();
                format!("{} {}", text["status"], text["code"].as_str().unwrap())
            }
        }
    }

    #[test]
    fn who_gets_in() {
        const OUT: &str = "421 misdirected_request";
        const ORIGIN: &str = "403 origin_refused";
        const TYPE: &str = "415 unsupported_media_type";
        for (line, expected) in [
            // Host.
            ("GET /v1/workflows | host: localhost", "in"),
            ("GET /v1/workflows | host: LocalHost:7420", "in"),
            ("GET /v1/workflows | host: 127.0.0.1:7420", "in"),
            ("GET /v1/workflows | host: 127.255.0.3", "in"),
            ("GET /v1/workflows | host: [::1]:7420", "in"),
            ("GET /v1/workflows | host: [0:0:0:0:0:0:0:1]", "in"),
            ("GET /v1/workflows", OUT),
            ("GET /v1/workflows | host: ", OUT),
            ("GET /v1/workflows | host: localhost | host: localhost", OUT),
            ("GET /v1/workflows | host: evil.example", OUT),
            ("GET /v1/workflows | host: localhost.evil.example", OUT),
            ("GET /v1/workflows | host: evil.example:7420", OUT),
            ("GET /v1/workflows | host: localhost@evil.example", OUT),
            ("GET /v1/workflows | host: localhost:7420@evil.example", OUT),
            ("GET /v1/workflows | host: localhost:", OUT),
            ("GET /v1/workflows | host: localhost:99999", OUT),
            ("GET /v1/workflows | host: localhost:+80", OUT),
            ("GET /v1/workflows | host: localhost.", OUT),
            ("GET /v1/workflows | host: 127.1", OUT),
            ("GET /v1/workflows | host: 127.0.0.01", OUT),
            ("GET /v1/workflows | host: 2130706433", OUT),
            ("GET /v1/workflows | host: 0.0.0.0", OUT),
            ("GET /v1/workflows | host: 128.0.0.1", OUT),
            ("GET /v1/workflows | host: [::ffff:127.0.0.1]", OUT),
            ("GET /v1/workflows | host: [::1", OUT),
            ("GET /v1/workflows | host: [::1]x", OUT),
            ("GET http://localhost:1/v1/workflows | host: localhost", "in"),
            ("GET http://evil.example/v1/workflows | host: localhost", OUT),
            // Origin.
            ("GET / | host: localhost:7420 | origin: http://localhost:7420", "in"),
            ("GET / | host: localhost:7420 | origin: http://LOCALHOST:7420", "in"),
            ("GET / | host: localhost:7420 | origin: http://localhost", ORIGIN),
            ("GET / | host: localhost:7420 | origin: http://localhost:3000", ORIGIN),
            ("GET / | host: localhost:7420 | origin: http://127.0.0.1:7420", ORIGIN),
            ("GET / | host: localhost:7420 | origin: https://localhost:7420", ORIGIN),
            ("GET / | host: localhost:7420 | origin: https://evil.example", ORIGIN),
            ("GET / | host: localhost:7420 | origin: null", ORIGIN),
            ("GET / | host: localhost:7420 | origin: ", ORIGIN),
            ("GET / | host: localhost | origin: http://localhost | origin: http://localhost", ORIGIN),
            ("GET / | host: evil.example | origin: http://evil.example", OUT),
            // Content type.
            ("POST /v1/workflows | host: localhost", "in"),
            ("POST /v1/workflows | host: localhost | content-length: 0", "in"),
            ("POST /v1/workflows | host: localhost | content-length: 2", TYPE),
            ("POST /v1/workflows | host: localhost | transfer-encoding: chunked", TYPE),
            ("POST /x | host: localhost | content-length: 2 | content-type: application/json", "in"),
            ("POST /x | host: localhost | content-length: 2 | content-type: Application/JSON; Charset=\"UTF-8\"", "in"),
            ("POST /x | host: localhost | content-length: 2 | content-type: application/json; charset=latin1", TYPE),
            ("POST /x | host: localhost | content-length: 2 | content-type: text/plain", TYPE),
            ("POST /x | host: localhost | content-length: 2 | content-type: text/json", TYPE),
            ("POST /x | host: localhost | content-length: 2 | content-type: application/jsonp", TYPE),
            ("POST /x | host: localhost | content-length: 2 | content-type: application/x-ndjson", TYPE),
            ("POST /x | host: localhost | content-length: 2 | content-type: application/x-www-form-urlencoded", TYPE),
            (
                "POST /x | host: localhost | content-length: 2 | content-type: application/json | content-encoding: gzip",
                TYPE,
            ),
            (
                "POST /x | host: localhost | content-length: 2 | content-type: application/json | content-type: text/plain",
                TYPE,
            ),
            (
                "POST /v1/workflows/bulk | host: localhost | content-length: 2 | content-type: application/x-ndjson",
                "in",
            ),
            ("POST /v1/workflows/bulk | host: localhost | content-length: 2 | content-type: application/json", TYPE),
        ] {
            assert_eq!(verdict(line), expected, "{line}");
        }
    }
}
