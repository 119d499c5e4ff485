; What a program in a library calls beside memory.ll: messages, and checks of what it is given.
; A line `@name = text "..."` stands for a string that ends with a zero.

@text_key = internal global i32 0
@text_once = internal global i32 0
@no_key = internal global i32 0  ; whether the process had none left
@shared_room = internal global [2048 x i8] zeroinitializer  ; for the messages of all threads then
@no_text = text ""

declare ptr @calloc(i64, i64) nonlazybind
declare void @free(ptr) nonlazybind
declare i32 @snprintf(ptr, i64, ptr, ...) nonlazybind
declare i32 @pthread_once(ptr, ptr) nonlazybind
declare i32 @pthread_key_create(ptr, ptr) nonlazybind
declare ptr @pthread_getspecific(i32) nonlazybind
declare i32 @pthread_setspecific(i32, ptr) nonlazybind
declare i32 @aoti_torch_copy_(ptr, ptr, i32) nonlazybind
declare i32 @aoti_torch_get_sizes(ptr, ptr) nonlazybind
declare i32 @aoti_torch_get_layout(ptr, ptr) nonlazybind
declare i32 @aoti_torch_get_device_type(ptr, ptr) nonlazybind
declare i32 @aoti_torch_get_device_index(ptr, ptr) nonlazybind
declare extern_weak ptr @torch_exception_get_what_without_backtrace() nonlazybind  ; torch 2.13

; --- what went wrong ---

define internal void @make_key() {
  %code = call i32 @pthread_key_create(ptr @text_key, ptr @free)
  store i32 %code, ptr @no_key
  ret void
}

; Room for this thread's message.
define internal ptr @room_for_text() {
  call i32 @pthread_once(ptr @text_once, ptr @make_key)
  %code = load i32, ptr @no_key
  %is_made = icmp eq i32 %code, 0
  br i1 %is_made, label %own, label %shared
shared:
  ret ptr @shared_room
own:
  %key = load i32, ptr @text_key
  %known = call ptr @pthread_getspecific(i32 %key)
  %is_known = icmp ne ptr %known, null
  br i1 %is_known, label %old, label %new
old:
  ret ptr %known
new:
  %fresh = call ptr @calloc(i64 2048, i64 1)
  call i32 @pthread_setspecific(i32 %key, ptr %fresh)
  ret ptr %fresh
}

define i32 @AOTInductorGetLastError(ptr %result) {
  %text = call ptr @room_for_text()
  store ptr %text, ptr %result
  ret i32 0
}

@plain_format = text "%s"
@named_format = text "%s: %s"

; A message of one part; the result is the code of failure.
define internal i32 @say(ptr %text) {
  %room = call ptr @room_for_text()
  call i32 (ptr, i64, ptr, ...) @snprintf(ptr %room, i64 2048, ptr @plain_format, ptr %text)
  ret i32 1
}

; A message about something with a name.
define internal i32 @say_of(ptr %name, ptr %text) {
  %room = call ptr @room_for_text()
  call i32 (ptr, i64, ptr, ...) @snprintf(ptr %room, i64 2048, ptr @named_format, ptr %name, ptr %text)
  ret i32 1
}

@unknown_reason = text "torch could not do it, and wrote why to stderr"

; A step of the program failed: what it was, and what torch says, where it does.
define internal void @stator_step_failed(ptr %what) {
  %asks = icmp ne ptr @torch_exception_get_what_without_backtrace, null
  br i1 %asks, label %ask, label %silent
ask:
  %reason = call ptr @torch_exception_get_what_without_backtrace()
  %has_one = icmp ne ptr %reason, null
  br i1 %has_one, label %full, label %silent
full:
  call i32 @say_of(ptr %what, ptr %reason)
  ret void
silent:
  call i32 @say_of(ptr %what, ptr @unknown_reason)
  ret void
}

; --- inputs ---

@layout_format = text "input %ld, %s: it is sparse, or packed, and it was built for a dense tensor; give it as to_dense()"
@type_format = text "input %ld, %s: type %s, and it was built for %s"
@dims_format = text "input %ld, %s: %ld dimensions, and it was built for %ld"
@size_format = text "input %ld, %s: size %ld in dimension %ld, and it was built for %ld"
@range_format = text "input %ld, %s: size %ld in dimension %ld, and it was built for %ld to %ld"
@least_format = text "input %ld, %s: size %ld in dimension %ld, and it was built for %ld or more"

@kind_format = text "input %ld, %s: it is on %s, and it was built for %s; move it there first"
@place_format = text "input %ld, %s: it is on cuda:%d, and the program was loaded on cuda:%d; move it there first"
@cpu_text = text "cpu"
@cuda_text = text "cuda"
@elsewhere_text = text "another kind of device"

define internal ptr @kind_name(i32 %kind) {
  %is_cpu = icmp eq i32 %kind, 0
  %is_cuda = icmp eq i32 %kind, 1
  %other = select i1 %is_cuda, ptr @cuda_text, ptr @elsewhere_text
  %name = select i1 %is_cpu, ptr @cpu_text, ptr %other
  ret ptr %name
}

; Whether an input is on a device of that kind, and if it is no CPU on the one of that number.
define internal i32 @stator_check_place(ptr %tensor, i64 %number, ptr %name, i32 %kind, i32 %device) {
  %word = alloca i64
  call i32 @aoti_torch_get_device_type(ptr %tensor, ptr %word)
  %its_kind = load i32, ptr %word
  %same_kind = icmp eq i32 %its_kind, %kind
  br i1 %same_kind, label %which, label %other_kind
other_kind:
  %its_text = call ptr @kind_name(i32 %its_kind)
  %our_text = call ptr @kind_name(i32 %kind)
  %room = call ptr @room_for_text()
  call i32 (ptr, i64, ptr, ...) @snprintf(ptr %room, i64 2048, ptr @kind_format, i64 %number, ptr %name, ptr %its_text, ptr %our_text)
  ret i32 1
which:
  %near = icmp eq i32 %kind, 0
  br i1 %near, label %good, label %ask
ask:
  call i32 @aoti_torch_get_device_index(ptr %tensor, ptr %word)
  %its_device = load i32, ptr %word
  %same = icmp eq i32 %its_device, %device
  br i1 %same, label %good, label %other
other:
  %other_room = call ptr @room_for_text()
  call i32 (ptr, i64, ptr, ...) @snprintf(ptr %other_room, i64 2048, ptr @place_format, i64 %number, ptr %name, i32 %its_device, i32 %device)
  ret i32 1
good:
  ret i32 0
}

; Whether an input is of the type and the sizes (-1: any) that the program was built for.  Only who
; has something to say takes this thread's room: a process has few keys, and each library takes one.
define internal i32 @stator_check_input(ptr %tensor, i64 %number, ptr %name, i32 %dtype, i64 %dims, ptr %sizes) {
  %room = alloca [2048 x i8]
  %differs = call i32 @compare_input(ptr %tensor, i64 %number, ptr %name, i32 %dtype, i64 %dims, ptr %sizes, ptr %room)
  %same = icmp eq i32 %differs, 0
  br i1 %same, label %good, label %bad
bad:
  %code = call i32 @say(ptr %room)
  ret i32 %code
good:
  ret i32 0
}

; The same; where it is not, `room` has the message.
define internal i32 @compare_input(ptr %tensor, i64 %number, ptr %name, i32 %dtype, i64 %dims, ptr %sizes, ptr %room) {
entry:
  %word = alloca i64
  %list_at = alloca ptr
  call i32 @aoti_torch_get_dtype(ptr %tensor, ptr %word)
  %its_type = load i32, ptr %word
  %same_type = icmp eq i32 %its_type, %dtype
  br i1 %same_type, label %layout, label %other_type
other_type:
  %its_text = call ptr @type_name(i32 %its_type)
  %our_text = call ptr @type_name(i32 %dtype)
  call i32 (ptr, i64, ptr, ...) @snprintf(ptr %room, i64 2048, ptr @type_format, i64 %number, ptr %name, ptr %its_text, ptr %our_text)
  ret i32 1
layout:
  call i32 @aoti_torch_get_layout(ptr %tensor, ptr %word)
  %its_layout = load i32, ptr %word
  %is_strided = icmp eq i32 %its_layout, 0
  br i1 %is_strided, label %rank, label %other_layout
other_layout:
  call i32 (ptr, i64, ptr, ...) @snprintf(ptr %room, i64 2048, ptr @layout_format, i64 %number, ptr %name)
  ret i32 1
rank:
  call i32 @aoti_torch_get_dim(ptr %tensor, ptr %word)
  %its_dims = load i64, ptr %word
  %same_dims = icmp eq i64 %its_dims, %dims
  br i1 %same_dims, label %look, label %other_dims
other_dims:
  call i32 (ptr, i64, ptr, ...) @snprintf(ptr %room, i64 2048, ptr @dims_format, i64 %number, ptr %name, i64 %its_dims, i64 %dims)
  ret i32 1
look:
  call i32 @aoti_torch_get_sizes(ptr %tensor, ptr %list_at)
  %list = load ptr, ptr %list_at
  br label %head
head:
  %i = phi i64 [ 0, %look ], [ %j, %next ]
  %more = icmp slt i64 %i, %dims
  br i1 %more, label %body, label %good
body:
  %want_at = getelementptr i64, ptr %sizes, i64 %i
  %have_at = getelementptr i64, ptr %list, i64 %i
  %want = load i64, ptr %want_at
  %have = load i64, ptr %have_at
  %any = icmp slt i64 %want, 0
  %same = icmp eq i64 %want, %have
  %fits = or i1 %any, %same
  br i1 %fits, label %next, label %other_size
next:
  %j = add i64 %i, 1
  br label %head
other_size:
  call i32 (ptr, i64, ptr, ...) @snprintf(ptr %room, i64 2048, ptr @size_format, i64 %number, ptr %name, i64 %have, i64 %i, i64 %want)
  ret i32 1
good:
  ret i32 0
}

@promised_dims_format = text "%s returned a tensor of %ld dimensions, and its fake implementation said %ld: correct that one (torch.library.register_fake)"
@promised_size_format = text "%s returned a tensor of size %ld in dimension %ld, and its fake implementation said %ld: correct that one (torch.library.register_fake)"

; Whether an operator of the user's returned the sizes (-1: any) that it had promised.
define internal i32 @stator_check_promise(ptr %tensor, ptr %operator, i64 %dims, ptr %sizes) {
entry:
  %word = alloca i64
  %list_at = alloca ptr
  call i32 @aoti_torch_get_dim(ptr %tensor, ptr %word)
  %its_dims = load i64, ptr %word
  %same_dims = icmp eq i64 %its_dims, %dims
  br i1 %same_dims, label %look, label %other_dims
other_dims:
  %room = call ptr @room_for_text()
  call i32 (ptr, i64, ptr, ...) @snprintf(ptr %room, i64 2048, ptr @promised_dims_format, ptr %operator, i64 %its_dims, i64 %dims)
  ret i32 1
look:
  call i32 @aoti_torch_get_sizes(ptr %tensor, ptr %list_at)
  %list = load ptr, ptr %list_at
  br label %head
head:
  %i = phi i64 [ 0, %look ], [ %j, %next ]
  %more = icmp slt i64 %i, %dims
  br i1 %more, label %body, label %good
body:
  %want_at = getelementptr i64, ptr %sizes, i64 %i
  %have_at = getelementptr i64, ptr %list, i64 %i
  %want = load i64, ptr %want_at
  %have = load i64, ptr %have_at
  %any = icmp slt i64 %want, 0
  %same = icmp eq i64 %want, %have
  %fits = or i1 %any, %same
  br i1 %fits, label %next, label %other_size
next:
  %j = add i64 %i, 1
  br label %head
other_size:
  %other_room = call ptr @room_for_text()
  call i32 (ptr, i64, ptr, ...) @snprintf(ptr %other_room, i64 2048, ptr @promised_size_format, ptr %operator, i64 %have, i64 %i, i64 %want)
  ret i32 1
good:
  ret i32 0
}

; Whether a size that may vary is one of those that the program was built for.
define internal i32 @stator_check_size(ptr %tensor, i64 %number, ptr %name, i64 %dim, i64 %low, i64 %high) {
  %list_at = alloca ptr
  call i32 @aoti_torch_get_sizes(ptr %tensor, ptr %list_at)
  %list = load ptr, ptr %list_at
  %have_at = getelementptr i64, ptr %list, i64 %dim
  %have = load i64, ptr %have_at
  %enough = icmp sge i64 %have, %low
  %not_more = icmp sle i64 %have, %high
  %good = and i1 %enough, %not_more
  br i1 %good, label %fine, label %bad
fine:
  ret i32 0
bad:
  %room = call ptr @room_for_text()
  %one = icmp eq i64 %low, %high
  %unbounded = icmp sge i64 %high, 4611686018427387904
  %several = select i1 %unbounded, ptr @least_format, ptr @range_format
  %format = select i1 %one, ptr @size_format, ptr %several
  call i32 (ptr, i64, ptr, ...) @snprintf(ptr %room, i64 2048, ptr %format, i64 %number, ptr %name, i64 %have, i64 %dim, i64 %low, i64 %high)
  ret i32 1
}

; A copy of a tensor that lies as a kernel expects it, into %slot, for the tensor at %place.
define internal i32 @stator_lay_out(ptr %place, ptr %slot, i64 %dims, ptr %stride, i32 %dtype, ptr %data) {
  %list_at = alloca ptr
  %fresh_at = alloca ptr
  %word = alloca i64
  %tensor = load ptr, ptr %place
  call i32 @aoti_torch_get_sizes(ptr %tensor, ptr %list_at)
  %sizes = load ptr, ptr %list_at
  call i32 @aoti_torch_get_device_type(ptr %tensor, ptr %word)
  %kind = load i32, ptr %word
  call i32 @aoti_torch_get_device_index(ptr %tensor, ptr %word)
  %device = load i32, ptr %word
  %made = call i32 @aoti_torch_empty_strided(i64 %dims, ptr %sizes, ptr %stride, i32 %dtype, i32 %kind, i32 %device, ptr %fresh_at)
  %is_made = icmp eq i32 %made, 0
  br i1 %is_made, label %copy, label %fail
copy:
  %fresh = load ptr, ptr %fresh_at
  %copied = call i32 @aoti_torch_copy_(ptr %fresh, ptr %tensor, i32 0)
  call void @stator_drop_handle(ptr %slot)  ; what it held is replaced
  store ptr %fresh, ptr %slot
  store ptr %fresh, ptr %place
  %is_copied = icmp eq i32 %copied, 0
  br i1 %is_copied, label %look, label %fail
look:
  %code = call i32 @torch_get_mutable_data_ptr(ptr %fresh, ptr %data)
  ret i32 %code
fail:
  ret i32 1
}

@type_unknown = text "a type that this library does not know"

define internal ptr @type_name(i32 %type) {
  %known = icmp ult i32 %type, {TYPES}
  br i1 %known, label %look, label %unknown
look:
  %at = getelementptr ptr, ptr @type_names, i32 %type
  %name = load ptr, ptr %at
  ret ptr %name
unknown:
  ret ptr @type_unknown
}

; --- which kernels ---

@kernels = internal global ptr null  ; a table of them, for the best of the levels that fit

declare ptr @getenv(ptr) nonlazybind
@level_name = text "STATOR_LEVEL"

; 1, 3 or 4 by what the processor has and the system keeps: x86-64-v3 has AVX2, v4 has AVX-512.
define i32 @stator_level() {
entry:
  %one = call { i32, i32, i32, i32 } asm sideeffect "cpuid", "={ax},={bx},={cx},={dx},{ax},{cx},~{dirflag},~{fpsr},~{flags}"(i32 1, i32 0)
  %features = extractvalue { i32, i32, i32, i32 } %one, 2
  %needed = and i32 %features, 943722496  ; FMA, MOVBE, OSXSAVE, AVX, F16C
  %has_base = icmp eq i32 %needed, 943722496
  br i1 %has_base, label %system, label %first
system:
  %kept = call { i32, i32 } asm sideeffect "xgetbv", "={ax},={dx},{cx},~{dirflag},~{fpsr},~{flags}"(i32 0)
  %state = extractvalue { i32, i32 } %kept, 0
  %ymm = and i32 %state, 6
  %has_ymm = icmp eq i32 %ymm, 6
  br i1 %has_ymm, label %seven, label %first
seven:
  %more = call { i32, i32, i32, i32 } asm sideeffect "cpuid", "={ax},={bx},={cx},={dx},{ax},{cx},~{dirflag},~{fpsr},~{flags}"(i32 7, i32 0)
  %wide = extractvalue { i32, i32, i32, i32 } %more, 1
  %third_bits = and i32 %wide, 296  ; BMI1, AVX2, BMI2
  %has_third = icmp eq i32 %third_bits, 296
  br i1 %has_third, label %last, label %first
last:
  %fourth_bits = and i32 %wide, -805109760  ; AVX-512 F, DQ, CD, BW, VL
  %has_fourth = icmp eq i32 %fourth_bits, -805109760
  %zmm = and i32 %state, 230
  %has_zmm = icmp eq i32 %zmm, 230
  %both = and i1 %has_fourth, %has_zmm
  %level = select i1 %both, i32 4, i32 3
  ret i32 %level
first:
  ret i32 1
}

@level_format = text "its kernels are for level %d of x86-64 and above, and this processor, or STATOR_LEVEL, is of level %d"

; Take the kernels of the best level that is here, or of a lower one that the environment asks for.
define internal i32 @stator_choose_kernels() {
entry:
  %best = call i32 @stator_level()
  %asked = call ptr @getenv(ptr @level_name)
  %none = icmp eq ptr %asked, null
  br i1 %none, label %choose, label %read
read:
  %digit = load i8, ptr %asked
  %less = sub i8 %digit, 48
  %wanted = zext i8 %less to i32
  %lower = icmp ult i32 %wanted, %best
  %bounded = select i1 %lower, i32 %wanted, i32 %best
  br label %choose
choose:
  %level = phi i32 [ %best, %entry ], [ %bounded, %read ]
  %table = call ptr @kernels_of(i32 %level)
  %fits = icmp ne ptr %table, null
  br i1 %fits, label %take, label %refuse
take:
  store ptr %table, ptr @kernels
  ret i32 0
refuse:
  %lowest = load i32, ptr @lowest_level
  %room = call ptr @room_for_text()
  call i32 (ptr, i64, ptr, ...) @snprintf(ptr %room, i64 2048, ptr @level_format, i32 %lowest, i32 %level)
  ret i32 1
}
